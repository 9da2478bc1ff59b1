"""Self-speculation: the target's own first layers draft, all of its layers verify.

As in Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) and LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710).
"""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.base import Draft, Drafter, Verdict
from specjax.drafters.expansion import expand, read_cached
from specjax.errors import InputError
from specjax.models.cache import KVCache
from specjax.models.transformer import Output, Target
from specjax.sampling import RowSampling
from specjax.tree import Chain, Shape


@struct.dataclass
class EarlyExitState:
    """The target's cache while drafting, None otherwise: its first layers are this drafter's cache."""

    cache: KVCache | None = None


@struct.dataclass
class EarlyExit(Drafter):
    """Drafts with the target's first ``layers`` layers, then its own final norm and head. Needs no weights of its own.

    What it writes into the target's cache while drafting lies above ``length``, and verification overwrites what is accepted.

    Attributes:
        layers: at least 1 and fewer than the target has.
        draft: the shape of its drafts, any of `specjax.tree`.
    """

    layers: int = struct.field(pytree_node=False)
    draft: Shape = struct.field(pytree_node=False, default=Chain(4))
    grows_trees: ClassVar[bool] = True
    borrows_cache: ClassVar[bool] = True

    def check(self, target: Target) -> None:
        if not 1 <= self.layers < target.config.num_layers:
            raise InputError(f"EarlyExit(layers={self.layers}): the target has {target.config.num_layers}; give 1 to one less")

    def prefill(self, target: Target, tokens: jax.Array, lengths: jax.Array, output: Output, cache: KVCache) -> EarlyExitState:
        return EarlyExitState()

    def propose(
        self, target: Target, state: EarlyExitState, root: jax.Array, sampling: RowSampling, keys: jax.Array
    ) -> tuple[Draft, EarlyExitState]:
        assert state.cache is not None
        lent = state.cache
        own = KVCache(layers=lent.layers[: self.layers], length=lent.length)

        at_root, own = target.forward(root[:, None], own, layers=self.layers)
        assert at_root.logits is not None and own is not None
        own = own.keep(None, jnp.ones_like(root))
        read = partial(read_cached, target, layers=self.layers)
        draft, _, own = expand(self.draft, read, at_root.logits[:, 0], own, root, sampling, keys)
        return draft, EarlyExitState(cache=replace(lent, layers=own.layers + lent.layers[self.layers :]))

    def update(
        self,
        target: Target,
        state: EarlyExitState,
        draft: Draft,
        verdict: Verdict,
        output: Output,
        cache: KVCache,
    ) -> EarlyExitState:
        return state
