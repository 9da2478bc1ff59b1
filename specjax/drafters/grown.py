"""A drafter that was trained for a small target, at work on a grown copy of it."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
from flax import struct

from specjax.draft import Draft, Verdict
from specjax.drafters.base import Drafter, Seen
from specjax.errors import InputError
from specjax.models.config import ModelConfig
from specjax.models.transformer import Target
from specjax.sampling import RowSampling
from specjax.tree import Shape


@struct.dataclass
class OnGrown(Drafter):
    """``inner``, whose target has been grown by `models.growth.grow`.

    A grown model computes what the small one does, in the first units of its hidden states; all others are 0. So the drafter is
    shown those units alone, and stays as small as it was trained. It is for demonstrations and measurements: real targets come
    in the size that their drafters were made for.

    Attributes:
        inner: the drafter of the small target.
        original: the small target's embedding, final norm and head.
        draft: the shape of its drafts.
    """

    inner: Any
    original: Target
    draft: Shape = struct.field(pytree_node=False)
    grows_trees: ClassVar[bool] = True

    @classmethod
    def of(cls, inner: Drafter, small: Target) -> "OnGrown":
        """The drafter of ``small``, for a grown copy of it. It must not read the target's cache."""
        if inner.reads_cache:
            raise InputError(f"inner: {type(inner).__name__} runs the target's layers, and these have grown; use it as it is")
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
        self._drafter.check(self.original)
        small = self.original.config
        if target.config.vocab_size != small.vocab_size or target.config.hidden_size < small.hidden_size:
            raise InputError(
                f"target: of hidden size {target.config.hidden_size} and {target.config.vocab_size} tokens, which cannot have "
                f"grown from one of {small.hidden_size} and {small.vocab_size}"
            )

    def start(self, target: Target, batch: int, capacity: int) -> Any:
        return self._drafter.start(self.original, batch, capacity)

    def absorb(self, target: Target, state: Any, seen: Seen) -> Any:
        return self._drafter.absorb(self.original, state, self._narrow(seen))

    def propose(
        self, target: Target, state: Any, root: jax.Array, sampling: RowSampling, keys: jax.Array, active: jax.Array
    ) -> tuple[Draft, Any]:
        return self._drafter.propose(self.original, state, root, sampling, keys, active)

    def update(self, target: Target, state: Any, draft: Draft, verdict: Verdict, seen: Seen) -> Any:
        return self._drafter.update(self.original, state, draft, verdict, self._narrow(seen))

    def _narrow(self, seen: Seen) -> Seen:
        size = self.original.config.hidden_size
        output = replace(seen.output, hidden=seen.output.hidden[..., :size], taps=seen.output.taps[..., :size])
        return replace(seen, output=output)
