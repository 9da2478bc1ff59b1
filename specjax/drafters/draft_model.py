"""A smaller model of the same vocabulary as the drafter (Leviathan et al. 2023, arXiv 2211.17192)."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.drafters.base import Draft, Drafter, Verdict
from specjax.drafters.expansion import expand, read_cached
from specjax.errors import InputError
from specjax.models.cache import KVCache
from specjax.models.config import ModelConfig
from specjax.models.transformer import Output, Target
from specjax.sampling import RowSampling
from specjax.tree import Chain, Shape


def check_vocabulary(own: ModelConfig, target: ModelConfig) -> None:
    """Refuse, with an InputError, a draft model that cannot share the target's tokenizer."""
    if own.vocab_size != target.vocab_size:
        raise InputError(
            f"drafter has a vocabulary of {own.vocab_size} tokens and target one of {target.vocab_size}: "
            "a draft model must share the target's tokenizer"
        )


@struct.dataclass
class DraftModelState:
    """Attributes:
    cache: the draft model's own. After drafting, the nodes that it read lie above ``length``.
    slots: ``[B, N]`` where: node n in slot ``length + slots[:, n]``; -1 for nodes that were never read, and the root.
    last: ``[B]`` the last accepted token of the row's newest draft.
    behind: ``[B]`` bool, ``last`` has never been read: the cache lacks one token more than the root. So it is after full
        acceptance, and wherever the path ends at a leaf.
    """

    cache: KVCache
    slots: jax.Array
    last: jax.Array
    behind: jax.Array


@struct.dataclass
class DraftModel(Drafter):
    """Drafts with a second, cheaper model.

    Attributes:
        model: of the target's vocabulary.
        draft: the shape of its drafts, any of `specjax.tree`.
    """

    model: Target
    draft: Shape = struct.field(pytree_node=False, default=Chain(4))
    grows_trees: ClassVar[bool] = True

    @classmethod
    def from_pretrained(
        cls, path: str | Path, draft: Shape = Chain(4), dtype: Any = None, mesh: Mesh | None = None
    ) -> "DraftModel":
        """Load the draft model as `Target.from_pretrained` loads a target."""
        return cls(model=Target.from_pretrained(path, dtype, mesh), draft=draft)

    @classmethod
    def init(cls, target: Target, key: jax.Array, draft: Shape = Chain(4), **sizes: Any) -> "DraftModel":
        """A random draft model that fits ``target``; consumes ``key``.

        ``sizes`` override the fields of its `ModelConfig`; by default it is the target's with a quarter of the layers.
        """
        sizes = {"num_layers": max(1, target.config.num_layers // 4)} | sizes
        config = ModelConfig(**(vars(target.config) | sizes))
        return cls(model=Target.init(config, key, target.dtype, target.mesh), draft=draft)

    def save_pretrained(self, path: str | Path, dtype: Any = None) -> None:
        """Write the draft model as a Hugging Face checkpoint."""
        self.model.save_pretrained(path, dtype)

    def check(self, target: Target) -> None:
        check_vocabulary(self.model.config, target.config)
        if self.draft.depth >= self.model.config.max_positions:
            raise InputError(
                f"draft={self.draft}: deeper than the {self.model.config.max_positions} positions of the draft model"
            )
        if self.model.mesh != target.mesh:
            raise InputError(f"drafter is on mesh={self.model.mesh} and target on {target.mesh}: load both with the same mesh")

    def prefill(self, target: Target, tokens: jax.Array, lengths: jax.Array, output: Output, cache: KVCache) -> DraftModelState:
        _, own = self.model.prefill(tokens, lengths, cache.capacity)
        batch = tokens.shape[0]
        slots = jnp.full((batch, self.draft.nodes), -1, jnp.int32)
        return DraftModelState(cache=own, slots=slots, last=tokens[:, 0], behind=jnp.zeros(batch, bool))

    def propose(
        self, target: Target, state: DraftModelState, root: jax.Array, sampling: RowSampling, keys: jax.Array
    ) -> tuple[Draft, DraftModelState]:
        # The first forward reads two tokens: the one that the newest path ended with, where it is unread, and the root.
        unread = jnp.stack([jnp.where(state.behind, state.last, root), root], axis=1)
        output, cache = self.model.forward(unread, state.cache)
        assert output.logits is not None and cache is not None
        logits = output.logits[jnp.arange(root.shape[0]), state.behind.astype(jnp.int32)]
        cache = cache.keep(None, 1 + state.behind)
        draft, slots, cache = expand(self.draft, partial(read_cached, self.model), logits, cache, root, sampling, keys)
        return draft, replace(state, cache=cache, slots=jnp.broadcast_to(slots, state.slots.shape))

    def update(
        self,
        target: Target,
        state: DraftModelState,
        draft: Draft,
        verdict: Verdict,
        output: Output,
        cache: KVCache,
    ) -> DraftModelState:
        accepted = verdict.count - 1  # -1 where the row has finished: its root is to be read again
        end = jnp.take_along_axis(verdict.path, jnp.maximum(accepted, 0)[:, None], axis=1)
        behind = (accepted > 0) & (jnp.take_along_axis(state.slots, end, axis=1)[:, 0] < 0)
        path = None if draft.is_chain else jnp.take_along_axis(state.slots, verdict.path[:, 1:], axis=1)
        return DraftModelState(
            cache=state.cache.keep(path, accepted - behind),
            slots=state.slots,
            last=jnp.take_along_axis(draft.tokens, end, axis=1)[:, 0],
            behind=behind,
        )
