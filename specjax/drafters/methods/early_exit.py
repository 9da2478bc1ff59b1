"""Self-speculation: the target's own first layers draft, and all of its layers verify.

It is as in Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) and LayerSkip (Elhoushi et al.
2024, arXiv 2404.16710).
"""

from collections.abc import Sequence
from typing import ClassVar

import jax
from flax import struct

from specjax.drafters.base import Drafter, DraftingReads
from specjax.drafters.expansion import draft_with
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models.cache import Entry, KVCache
from specjax.models.config import ModelConfig
from specjax.models.sparse_attention import entries_read
from specjax.models.transformer import Target
from specjax.sampling import RowSampling


@struct.dataclass
class EarlyExit(Drafter[tuple[()]]):
    """A drafter that consists of the target's first ``layers`` layers, its final norm and its head.

    It has no weights of its own. It reads the target's cache, because its layers compute the same
    KV entries for committed tokens as the target.

    Attributes:
        layers: the number of layers, at least 1 and fewer than the target has.
        draft: the shape of the drafts, any of `specjax.drafts.shapes`.

    Examples:
        >>> drafter = specjax.EarlyExit(layers=1, draft=2)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
    """

    layers: int = struct.field(pytree_node=False)
    draft: DraftShape | int = struct.field(pytree_node=False, default=Chain(4))
    grows_trees: ClassVar[bool] = True

    def check(self, target: Target) -> None:
        layers = target.config.num_layers
        if not 1 <= self.layers < layers:
            raise InputError(
                f"EarlyExit(layers={self.layers}): the target has {layers} layers; give from 1 to"
                f" {layers - 1}"
            )
        config = target.config
        first = min(*config.layers_with_entries, *config.layers_with_states, layers)
        if self.layers <= first:
            raise InputError(
                f"EarlyExit(layers={self.layers}): none of these layers reads earlier tokens, since"
                f" each has an MLP alone; give at least {first + 1}"
            )

    def reads(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(range(self.layers))

    def propose(
        self,
        target: Target,
        state: tuple[()],
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
        cache: KVCache | None = None,
    ) -> tuple[Draft, tuple[()]]:
        assert cache is not None
        return (
            draft_with(
                target,
                cache,
                self.draft_shape,
                root,
                sampling,
                keys,
                active,
                layers=(0, self.layers),
            ),
            state,
        )

    def drafting_reads(
        self, target: Target, state: tuple[()] = (), cache: Sequence[Entry] = ()
    ) -> DraftingReads:
        """Return the arrays of a level: the first layers, their part of the cache, and the head."""
        return DraftingReads(
            level=(
                target.params["layers"][: self.layers],
                entries_read(target.config, cache[: self.layers], target.mesh),
                target.head_as_stored,
            )
        )
