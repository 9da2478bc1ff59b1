"""A drafter that was trained for a small target, at work on a grown copy of it."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from specjax.draft import Draft, Verdict
from specjax.drafters.base import Drafter, Seen
from specjax.errors import InputError
from specjax.models.cache import Entry, KVCache
from specjax.models.config import ModelConfig
from specjax.models.transformer import Target
from specjax.sampling import RowSampling
from specjax.tree import Shape


@struct.dataclass
class _Narrow(Target):
    """The small target, its layers run by the ``grown`` one: they cost what a real target's do.

    Attributes:
        params: the small target's embedding, final norm and head.
        grown: the grown target. Its first layers are the small target's.
    """

    grown: Target = struct.field(kw_only=True)

    def new_scratch(self, batch: int, slots: int, layers: tuple[int, int] | None = None) -> tuple[Entry, ...]:
        return self.grown.new_scratch(batch, slots, (0, self.config.num_layers) if layers is None else layers)

    def run(self, x: jax.Array, cache: KVCache | None = None, **options: Any) -> tuple[jax.Array, jax.Array, tuple[Entry, ...]]:
        size, layers = self.config.hidden_size, options.pop("layers", None) or (0, self.config.num_layers)
        wide = jnp.pad(x, ((0, 0), (0, 0), (0, self.grown.config.hidden_size - size)))
        after, taps, new = self.grown.run(wide, cache, layers=layers, **options)
        return after[..., :size], taps[..., :size], new


@struct.dataclass
class OnGrown(Drafter):
    """``inner``, whose target has been grown by `models.growth.grow`.

    A grown model computes what the small one does, in the first units of its hidden states and the first heads of its keys and
    values; all others are 0. So the drafter is shown those alone, and stays as small as it was trained. Layers of the target
    that it runs itself are the grown one's. It is for demonstrations and measurements: real targets come in the size that their
    drafters were made for.

    Attributes:
        inner: the drafter of the small target.
        original: the small target's embedding, final norm and head.
        draft: the shape of its drafts.
    """

    inner: Any
    original: Target
    draft: Shape = struct.field(pytree_node=False)
    grows_trees: ClassVar[bool] = True
    reads_cache: ClassVar[bool] = True

    @classmethod
    def of(cls, inner: Drafter, small: Target) -> "OnGrown":
        """The drafter of ``small``, for a grown copy of it."""
        kept = {name: values for name, values in small.params.items() if name != "layers"}
        return cls(inner=inner, original=replace(small, params=kept), draft=inner.draft)

    @property
    def _drafter(self) -> Any:
        return replace(self.inner, draft=self.draft)

    @property
    def max_positions(self) -> int | None:
        return self.inner.max_positions

    @property
    def node_counts(self) -> tuple[int, ...]:
        return self._drafter.node_counts

    def taps(self, config: ModelConfig) -> tuple[int, ...]:
        return self.inner.taps(self.original.config)  # growing adds layers behind the others

    def check(self, target: Target) -> None:
        if type(self.inner).prompts_read is not Drafter.prompts_read:
            raise InputError(f"OnGrown: {type(self.inner).__name__} keeps the target's cache: use it on the grown one itself")
        self._drafter.check(self.original)
        small, large = self.original.config, target.config
        for name in ("hidden_size", "num_layers", "num_kv_heads"):
            if getattr(large, name) < getattr(small, name):
                raise InputError(f"target: {name}={getattr(large, name)} cannot have grown from {getattr(small, name)}")
        for name in ("vocab_size", "head_dim"):
            if getattr(large, name) != getattr(small, name):
                raise InputError(f"target: {name}={getattr(large, name)}, and the small target's is {getattr(small, name)}")

    def start(self, target: Target, batch: int, capacity: int) -> Any:
        return self._drafter.start(self._narrow(target), batch, capacity)

    def absorb(self, target: Target, state: Any, seen: Seen) -> Any:
        return self._drafter.absorb(self._narrow(target), state, self._narrowed(seen))

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
        given = {"cache": cache} if self.inner.reads_cache else {}
        return self._drafter.propose(self._narrow(target), state, root, sampling, keys, active, **given)

    def update(self, target: Target, state: Any, draft: Draft, verdict: Verdict, seen: Seen) -> Any:
        return self._drafter.update(self._narrow(target), state, draft, verdict, self._narrowed(seen))

    def _narrow(self, target: Target) -> Target:
        return _Narrow(self.original.params, self.original.config, self.original.mesh, grown=target)

    def _narrowed(self, seen: Seen) -> Seen:
        config = self.original.config
        size, heads = config.hidden_size, config.num_kv_heads
        output = replace(seen.output, hidden=seen.output.hidden[..., :size], taps=seen.output.taps[..., :size])
        entries = jax.tree.map(lambda part: part[:, :heads], seen.entries[: config.num_layers])
        return replace(seen, output=output, entries=entries)
