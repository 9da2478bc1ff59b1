"""Self-speculation: the target's own first layers draft, all of its layers verify.

As in Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) and LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710).
"""

from typing import Any, ClassVar

import jax
from flax import struct

from specjax.draft import Draft
from specjax.drafters.base import Drafter
from specjax.drafters.expansion import draft_with
from specjax.errors import InputError
from specjax.models.cache import KVCache
from specjax.models.transformer import Target
from specjax.sampling import RowSampling
from specjax.tree import Chain, Shape


@struct.dataclass
class EarlyExit(Drafter):
    """Drafts with the target's first ``layers`` layers, then its own final norm and head. Needs no weights of its own.

    It reads the target's cache: what those layers remember of the committed tokens is the target's own.

    Attributes:
        layers: at least 1 and fewer than the target has.
        draft: the shape of its drafts, any of `specjax.tree`.
    """

    layers: int = struct.field(pytree_node=False)
    draft: Shape = struct.field(pytree_node=False, default=Chain(4))
    grows_trees: ClassVar[bool] = True
    reads_cache: ClassVar[bool] = True

    def check(self, target: Target) -> None:
        if not 1 <= self.layers < target.config.num_layers:
            raise InputError(f"EarlyExit(layers={self.layers}): the target has {target.config.num_layers}; give 1 to one less")

    def propose(
        self,
        target: Target,
        state: Any,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
        cache: KVCache | None = None,
    ) -> tuple[Draft, Any]:
        assert cache is not None
        layers = (0, self.layers)
        own = cache.of_layers(*layers)
        return draft_with(target, own, self.draft, root, sampling, keys, active, layers=layers), state
