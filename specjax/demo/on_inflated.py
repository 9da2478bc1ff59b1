"""A drafter that was trained for a small target, used with an inflated copy of the target."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafters.base import Committed, Drafter, DraftingReads
from specjax.drafters.wrapper import Wrapper
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError
from specjax.models.attention import Filled
from specjax.models.cache import Cache, Entries, KVCache
from specjax.models.config import ModelConfig
from specjax.models.transformer import Target
from specjax.sampling import RowSampling


@struct.dataclass
class _Narrow(Target):
    """The small target, whose layers are run by the inflated one at the cost of a real target.

    Attributes:
        params: the small target's embedding, final norm and head.
        inflated: the inflated target. Its first layers are the small target's.
    """

    inflated: Target = struct.field(kw_only=True)

    def new_scratch(self, batch: int, slots: int, layers: tuple[int, int] | None = None) -> Entries:
        return self.inflated.new_scratch(
            batch, slots, (0, self.config.num_layers) if layers is None else layers
        )

    def run(
        self, x: jax.Array, cache: KVCache | None = None, **options: Any
    ) -> tuple[jax.Array, jax.Array, Entries]:
        size = self.config.hidden_size
        layers = options.pop("layers", None) or (0, self.config.num_layers)
        wide = jnp.pad(x, ((0, 0), (0, 0), (0, self.inflated.config.hidden_size - size)))
        after, taps, new = self.inflated.run(wide, cache, layers=layers, **options)
        return after[..., :size], taps[..., :size], new

    def cache_piece(
        self, cache: Cache, layer: int, positions: jax.Array, window: int | None
    ) -> Filled:
        piece = super().cache_piece(cache, layer, positions, window)
        heads = self.config.num_kv_heads
        return replace(piece, entry=jax.tree.map(lambda part: part[:, :heads], piece.entry))


@struct.dataclass
class OnInflated(Wrapper[Any]):
    """A drafter of a small target, for the target's copy from `demo.inflation.inflate`.

    The inflated model computes what the small one does, in the first units of its hidden states and
    the first heads of its keys and values; all others are 0. So the drafter receives only these,
    and keeps the size for which it was trained. Layers of the target that the drafter runs itself
    are the inflated ones. This class is for demonstrations and measurements: real targets have the
    size that their drafters are made for.

    Attributes:
        inner: the drafter of the small target.
        original: the small target's embedding, final norm and head.
        draft: the shape of its drafts.
    """

    inner: Any
    original: Target
    draft: DraftShape | int = struct.field(pytree_node=False)
    grows_trees: ClassVar[bool] = True

    @classmethod
    def of(cls, inner: Drafter, small: Target) -> "OnInflated":
        """Return a drafter of ``small`` for its inflated copy."""
        params = {name: values for name, values in small.params.items() if name != "layers"}
        return cls(inner=inner, original=replace(small, params=params), draft=inner.draft)

    @property
    def wrapped(self) -> Any:
        return replace(self.inner, draft=self.draft)

    def own_state(self, state: Any) -> Any:
        return state

    def with_own(self, state: Any, new_state: Any) -> Any:
        return new_state

    def taps(self, config: ModelConfig) -> tuple[int, ...]:
        return self.inner.taps(self.original.config)  # inflation adds layers after the others

    def reads(self, config: ModelConfig) -> tuple[int, ...]:
        return self.inner.reads(self.original.config)

    def check(self, target: Target) -> None:
        if type(self.inner).prompts_read is not Drafter.prompts_read:
            raise InputError(
                f"OnInflated: {type(self.inner).__name__} keeps the target's cache: use it on the"
                " target itself"
            )
        self.wrapped.check(self.original)
        small, large = self.original.config, target.config
        for name in ("hidden_size", "num_layers", "num_kv_heads"):
            if getattr(large, name) < getattr(small, name):
                raise InputError(
                    f"target: {name}={getattr(large, name)} cannot have been inflated from"
                    f" {getattr(small, name)}"
                )
        for name in ("vocab_size", "head_dim"):
            if getattr(large, name) != getattr(small, name):
                raise InputError(
                    f"target: {name}={getattr(large, name)}, but the small target's is"
                    f" {getattr(small, name)}"
                )

    def start(self, target: Target, batch: int, capacity: int) -> Any:
        return self.wrapped.start(self._narrow(target), batch, capacity)

    def append_committed(self, target: Target, state: Any, committed: Committed) -> Any:
        return super().append_committed(self._narrow(target), state, self._narrowed(committed))

    def propose(
        self,
        target: Target,
        state: Any,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
        **cache: Any,
    ) -> tuple[Draft, Any]:
        return super().propose(self._narrow(target), state, root, sampling, keys, active, **cache)

    def update(
        self, target: Target, state: Any, draft: Draft, verdict: Verdict, committed: Committed
    ) -> Any:
        return super().update(
            self._narrow(target), state, draft, verdict, self._narrowed(committed)
        )

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        return DraftingReads()  # unknown: it runs layers of the inflated target

    def _narrow(self, target: Target) -> Target:
        return _Narrow(
            self.original.params, self.original.config, self.original.mesh, inflated=target
        )

    def _narrowed(self, committed: Committed) -> Committed:
        config = self.original.config
        size, heads = config.hidden_size, config.num_kv_heads
        output = replace(
            committed.output,
            hidden=committed.output.hidden[..., :size],
            taps=committed.output.taps[..., :size],
        )
        entries = jax.tree.map(lambda part: part[:, :heads], committed.entries[: config.num_layers])
        return replace(committed, output=output, entries=entries)
