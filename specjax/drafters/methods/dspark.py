"""DSpark (DeepSeek-AI 2026, github.com/deepseek-ai/DeepSpec): a DFlash whose tokens know the one before them.

The block is read once, as by a DFlash. Two small heads follow. The *Markov head* changes the logits of a token by the one that
was drafted before it, so that a chain goes on from what it has drafted, and the children of a tree's nodes differ. The
*confidence head* says how likely a token is to be accepted: chains may end by it (`Chain.stop_below`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.base import DraftingReads
from specjax.drafters.candidates import CandidateTokens, offered_by
from specjax.drafters.checkpoints import dflash as dflash_checkpoint
from specjax.drafters.checkpoints.dflash_config import Markov
from specjax.drafters.expansion import Frontier, expand
from specjax.drafters.methods.dflash import DFlash
from specjax.drafters.trained import CheckpointFormat
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError
from specjax.models.cache import Cache, Entry
from specjax.models.primitives import linear, vocabulary_logits
from specjax.models.transformer import Target
from specjax.sampling import RowSampling


@struct.dataclass
class DSpark(DFlash):
    """A `DFlash` with a Markov head, a confidence head, or both.

    A chain with ``stop_below`` ends after its first token of which the confidence head expects less than that. The authors drop
    that token, too; here it stays, as with every other drafter.

    Attributes:
        params: see `dflash_config.declare`.
        config: its configuration.
        draft: the shape of its drafts, at most as deep as a block has room for.
        mesh: where the params live.
        cache: what it remembers of a text, see `DFlash`.
        budget: with ``cache``, slots of a row in each layer.

    Examples:
        >>> drafter = specjax.DSpark.init(target, jax.random.key(1), draft=3, block_size=3)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
    """

    checkpoint_format: ClassVar[CheckpointFormat] = dflash_checkpoint.DSPARK

    @classmethod
    def init(
        cls,
        target: Target,
        key: jax.Array,
        draft: DraftShape | int | None = None,
        *,
        block_size: int = 7,
        markov_rank: int = 256,
        markov: Markov = "vanilla",
        confidence: bool = True,
        variant: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """A drafter for ``target`` with random weights; consumes ``key``. Its embedding and head begin as the target's.

        Args:
            target: what it will draft for.
            key: random.
            draft: the shape of its drafts; None: a chain of a whole block.
            block_size: tokens of a block, of which the anchor predicts the first.
            markov_rank: of the Markov head; 0: none.
            markov: its kind.
            confidence: whether there is a confidence head, which reads the token before where there is a Markov head.
            variant: further fields of `DFlashConfig`; by default embedding and head are its own, as DeepSpec has them.
            options: as in `DFlash.init`.
        """
        if not markov_rank and not confidence:
            raise InputError("markov_rank=0, confidence=False: a DSpark has at least one of the two heads; without, use DFlash")
        heads = {"markov_rank": markov_rank, "markov": markov, "confidence": confidence}
        heads["confidence_of_token"] = confidence and markov_rank > 0
        brings = {"from_anchor": True, "own_embedding": True, "own_head": True}
        given = brings | heads | dict(variant or {})
        return super().init(target, key, draft, block_size=block_size, variant=given, **options)

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        """Those of DeepSpec's drafters."""
        return {"num_layers": 5, "block_size": 7}

    def markov_memory(self, rows: tuple[int, ...]) -> jax.Array:
        """``[*rows, r]`` what the Markov head remembers before a block; r is 0 where it remembers nothing."""
        rank = self.config.markov_rank if self.config.markov == "rnn" else 0
        return jnp.zeros((*rows, rank), self._dtype)

    def after(
        self, logits: jax.Array, states: jax.Array, tokens: jax.Array, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """What is expected after tokens of a block, now that they are known.

        Args:
            logits: ``[..., Vd]`` of the block alone.
            states: ``[..., H]`` of the block, where the logits are from.
            tokens: ``[...]`` the tokens before.
            memory: ``[..., r]`` see `markov_memory`.

        Returns:
            The logits, the memory, and ``[...]`` the logit of the chance that what comes next is accepted, where there is a
            confidence head.
        """
        if not self.config.markov_rank:
            return jnp.broadcast_to(logits, (*tokens.shape, logits.shape[-1])), memory, self._confidence([states])
        vector = self.params["markov_in"][tokens].astype(self._dtype)
        states = jnp.broadcast_to(states, (*vector.shape[:-1], states.shape[-1])).astype(self._dtype)
        known = [states, vector] if self.config.confidence_of_token else [states]
        if self.config.markov == "gated":
            both = jnp.concatenate([states, vector], axis=-1)
            latent = jax.nn.sigmoid(linear(self.params, "markov_gate", both)) * vector
        elif self.config.markov == "rnn":
            joint = linear(self.params, "markov_joint", jnp.concatenate([memory, vector, states], axis=-1))
            gate, candidate, output = jnp.split(joint, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            memory, latent = gate * memory + (1 - gate) * jnp.tanh(candidate), jnp.tanh(output)
        else:
            latent = vector
        return logits + vocabulary_logits(latent, self.params["markov_out"]), memory, self._confidence(known)

    def _confidence(self, known: Sequence[jax.Array]) -> jax.Array | None:
        if not self.config.confidence:
            return None
        return linear(self.params, "confidence", jnp.concatenate(known, axis=-1))[..., 0].astype(jnp.float32)

    def propose(
        self, target: Target, state: Cache, root: jax.Array, sampling: RowSampling, keys: jax.Array, active: jax.Array
    ) -> tuple[Draft, Cache]:
        shape, vocabulary = self.draft_shape, self.vocabulary(target)
        slots = self.block(target, state, root)
        states = slots[:, -shape.depth :]
        every = self.logits(target, states)

        def offer(depth: jax.Array, tokens: jax.Array, memory: jax.Array) -> tuple[CandidateTokens, jax.Array]:
            logits, here = (jnp.take(values, depth, axis=1)[:, None] for values in (every, states))
            logits, memory, confidence = self.after(logits, here, tokens, memory)
            offered = offered_by(shape, logits, depth, sampling, keys[depth], vocabulary)
            if offered.confidence is not None and confidence is not None:
                offered = replace(offered, confidence=jax.nn.sigmoid(confidence))
            return offered, memory

        def read(frontier: Frontier, memory: jax.Array) -> tuple[CandidateTokens, jax.Array]:
            of_parents = jnp.take_along_axis(memory, frontier.parents[..., None], axis=1)
            return offer(frontier.depth, frontier.tokens, of_parents)

        memory = self.markov_memory((root.shape[0], 1))
        if not self.config.from_anchor:  # a recurrent head has read the anchor at its own place, too
            _, memory, _ = self.after(every[:, :1], slots[:, :1], root[:, None], memory)
        first, memory = offer(jnp.zeros((), jnp.int32), root[:, None], memory)
        memory = jnp.broadcast_to(memory, (root.shape[0], shape.width, memory.shape[-1]))
        draft, _, _ = expand(shape, read, first, memory, root, sampling, keys, active, vocabulary)
        return draft, state

    def drafting_reads(self, target: Target, state: Cache | tuple[()] = (), cache: Sequence[Entry] = ()) -> DraftingReads:
        """All but the Markov head once; of its first matrix a row for each node."""
        own = dict(self.own_weights)
        own.pop("markov_in", None)
        level = {name: own.pop(name) for name in list(own) if name.startswith("markov")}
        head = () if self.config.own_head else target.head_as_stored
        return DraftingReads(level=level, step=(own, state, head))
