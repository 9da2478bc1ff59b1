"""DSpark (DeepSeek-AI 2026): a DFlash whose tokens depend on the token before.

The authors' code is github.com/deepseek-ai/DeepSpec.

The block is read once, as in DFlash. Two small heads follow. The *Markov head* adds to the logits
of a token a bias that depends on the token drafted before it. So the tokens of a chain depend on
each other, and different nodes of a tree have different children. The *confidence head* predicts
how likely a token is to be accepted. Chains may stop early by it (`Chain.stop_below`).
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
from specjax.models.cache import Cache
from specjax.models.primitives import linear, vocabulary_logits
from specjax.models.transformer import Target
from specjax.sampling import RowSampling


@struct.dataclass
class DSpark(DFlash):
    """A `DFlash` with a Markov head, a confidence head, or both.

    A chain with ``stop_below`` ends after the first token whose predicted acceptance is lower. The
    authors drop that token as well. Here it stays, as with every other drafter, because dropping a
    drawn token would bias the output.

    Attributes:
        params: the parameters, see `dflash_config.declare`.
        config: the configuration.
        draft: the shape of the drafts, at most as deep as a block allows.
        mesh: the mesh of the parameters.
        cache: the scheme of the cache, see `DFlash`.
        budget: with ``cache``, the number of slots of a row in each layer.

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
        """Return a drafter for ``target`` with random weights.

        Its embedding and its head start as copies of the target's.

        Args:
            target: the target model.
            key: the random key for the weights. It is consumed.
            draft: the shape of the drafts; None is a chain of a whole block.
            block_size: the number of tokens of a block. The anchor predicts the first drafted
                token.
            markov_rank: the rank of the Markov head; 0 for none.
            markov: the kind of the Markov head.
            confidence: whether there is a confidence head. With a Markov head it reads the token
                before too.
            variant: further fields of `DFlashConfig`. By default the drafter has its own embedding
                and head, as in DeepSpec.
            options: as in `DFlash.init`.
        """
        if not markov_rank and not confidence:
            raise InputError(
                "markov_rank=0, confidence=False: a DSpark has at least one of the two heads; use"
                " DFlash instead"
            )
        heads = {"markov_rank": markov_rank, "markov": markov, "confidence": confidence}
        heads["confidence_of_token"] = confidence and markov_rank > 0
        defaults = {"from_anchor": True, "own_embedding": True, "own_head": True}
        fields = defaults | heads | dict(variant or {})
        return super().init(target, key, draft, block_size=block_size, variant=fields, **options)

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        """Return the sizes of DeepSpec's drafters."""
        return {"num_layers": 5, "block_size": 7}

    def markov_memory(self, rows: tuple[int, ...]) -> jax.Array:
        """Return the Markov head's memory ``[*rows, r]`` before a block; r is 0 without memory."""
        rank = self.config.markov_rank if self.config.markov == "rnn" else 0
        return jnp.zeros((*rows, rank), self._dtype)

    def after(
        self, logits: jax.Array, states: jax.Array, tokens: jax.Array, memory: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return the logits after the given tokens of a block.

        Args:
            logits: ``[..., Vd]``, the logits of the block alone.
            states: ``[..., H]``, the states of the block that these logits were computed from.
            tokens: ``[...]``, the tokens before.
            memory: ``[..., r]``, see `markov_memory`.

        Returns:
            The logits, the memory, and, if there is a confidence head, the logit ``[...]`` of the
            probability that the next token is accepted.
        """
        if not self.config.markov_rank:
            by_token = jnp.broadcast_to(logits, (*tokens.shape, logits.shape[-1]))
            return by_token, memory, self._confidence([states])
        vector = self.params["markov_in"][tokens].astype(self._dtype)
        states = jnp.broadcast_to(states, (*vector.shape[:-1], states.shape[-1]))
        states = states.astype(self._dtype)
        inputs = [states, vector] if self.config.confidence_of_token else [states]
        if self.config.markov == "gated":
            joined = jnp.concatenate([states, vector], axis=-1)
            latent = jax.nn.sigmoid(linear(self.params, "markov_gate", joined)) * vector
        elif self.config.markov == "rnn":
            joined = jnp.concatenate([memory, vector, states], axis=-1)
            joint = linear(self.params, "markov_joint", joined)
            gate, candidate, output = jnp.split(joint, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            memory, latent = gate * memory + (1 - gate) * jnp.tanh(candidate), jnp.tanh(output)
        else:
            latent = vector
        logits = logits + vocabulary_logits(latent, self.params["markov_out"])
        return logits, memory, self._confidence(inputs)

    def _confidence(self, inputs: Sequence[jax.Array]) -> jax.Array | None:
        if not self.config.confidence:
            return None
        confidence = linear(self.params, "confidence", jnp.concatenate(inputs, axis=-1))
        return confidence[..., 0].astype(jnp.float32)

    def propose(
        self,
        target: Target,
        state: Cache,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, Cache]:
        shape, vocabulary = self.draft_shape, self.vocabulary(target)
        slots = self.block(target, state, root)
        states = slots[:, -shape.depth :]
        logits_by_depth = self.logits(target, states)

        def children_after(
            depth: jax.Array, tokens: jax.Array, memory: jax.Array
        ) -> tuple[CandidateTokens, jax.Array]:
            logits, states_here = (
                jnp.take(values, depth, axis=1)[:, None] for values in (logits_by_depth, states)
            )
            logits, memory, confidence = self.after(logits, states_here, tokens, memory)
            children = offered_by(shape, logits, depth, sampling, keys[depth], vocabulary)
            # The trained head decides where a chain stops, not the draft's own probability.
            if children.confidence is not None and confidence is not None:
                children = replace(children, confidence=jax.nn.sigmoid(confidence))
            return children, memory

        def read(frontier: Frontier, memory: jax.Array) -> tuple[CandidateTokens, jax.Array]:
            parent_memory = jnp.take_along_axis(memory, frontier.parents[..., None], axis=1)
            return children_after(frontier.depth, frontier.tokens, parent_memory)

        memory = self.markov_memory((root.shape[0], 1))
        if not self.config.from_anchor:  # a recurrent head reads the anchor first
            _, memory, _ = self.after(logits_by_depth[:, :1], slots[:, :1], root[:, None], memory)
        first, memory = children_after(jnp.zeros((), jnp.int32), root[:, None], memory)
        memory = jnp.broadcast_to(memory, (root.shape[0], shape.width, memory.shape[-1]))
        draft, _, _ = expand(shape, read, first, memory, root, sampling, keys, active, vocabulary)
        return draft, state

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return all weights, read once, but the Markov head, which every level reads.

        Of its first matrix a node reads one row, which is not counted.
        """
        step = dict(self.own_weights)
        step.pop("markov_in", None)
        level = {name: step.pop(name) for name in list(step) if name.startswith("markov")}
        head = () if self.config.own_head else target.head_as_stored
        return DraftingReads(level=level, step=(step, state, head))
