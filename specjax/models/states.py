"""What layers with linear attention remember of a text: a state of fixed size."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from specjax import sharding
from specjax.models import delta_rule
from specjax.models.config import LinearAttention


@struct.dataclass
class State:
    """What one layer with linear attention remembers of the committed tokens of B rows.

    It cannot be cut to fewer tokens. So a drafted token is never written into it before it is accepted: until then it has an
    entry, as it has in other layers, of other parts (`empty_nodes`).

    Attributes:
        table: ``[B, value_heads, key_dim, value_dim]`` float32, the state of the gated delta rule.
        newest: of queries, keys and values each, ``[B, heads, kernel_size - 1, dim]``: what the newest tokens gave to the
            convolution, the newest last.
    """

    table: jax.Array
    newest: tuple[jax.Array, ...]

    @classmethod
    def zeros(cls, sizes: LinearAttention, batch: int, dtype: DTypeLike, mesh: Mesh | None = None) -> "State":
        """That of rows of which nothing has been read; ``dtype`` is that of the activations."""

        def zeros(heads: int, *shape: int, dtype: DTypeLike) -> jax.Array:
            return by_heads(jnp.zeros((batch, heads, *shape), dtype), sizes.key_heads, mesh)

        table = zeros(sizes.value_heads, sizes.key_dim, sizes.value_dim, dtype=jnp.float32)
        newest = tuple(zeros(heads, sizes.kernel - 1, dim, dtype=dtype) for heads, dim in sizes.convolved)
        return cls(table, newest)

    def append(self, entry: Sequence[Any], count: Int[Array, " B"]) -> "State":
        """The state after the first ``count [B]`` of each row's tokens, whose ``entry`` a pass has given, in order."""
        table = delta_rule.write(self.table, delta_rule.Node(*entry[:3]), count)
        return State(table, self.newest_after(entry[3:], count))

    def newest_after(self, convolved: Sequence[jax.Array], count: Int[Array, " B"]) -> tuple[jax.Array, ...]:
        """``newest`` after the first ``count [B]`` of tokens that give ``convolved``, ``[B, heads, n, dim]`` each."""
        joined = (jnp.concatenate([old, new.astype(old.dtype)], 2) for old, new in zip(self.newest, convolved, strict=True))
        return tuple(_after(tokens, count, self.newest[0].shape[2]) for tokens in joined)


def _after(tokens: jax.Array, count: jax.Array, kept: int) -> jax.Array:
    """``[B, heads, kept, dim]`` of ``tokens [B, heads, kept + n, dim]`` the newest, where ``count [B]`` of the n count."""
    indices = count[:, None] + jnp.arange(kept)[None]
    return jnp.take_along_axis(tokens, indices[:, None, :, None], axis=2)


def empty_nodes(
    sizes: LinearAttention, batch: int, slots: int, dtype: DTypeLike, mesh: Mesh | None = None
) -> tuple[jax.Array, ...]:
    """Zeros for the entries of ``slots`` drafted tokens a row. Its parts, with slots as the third axis, as in all entries: the
    three of `delta_rule.Node`, and queries, keys and values before the convolution, in the ``dtype`` of the activations."""
    shapes = [
        ((sizes.key_heads, slots, sizes.key_dim), jnp.float32),
        ((sizes.value_heads, slots, sizes.value_dim), jnp.float32),
        ((sizes.value_heads, slots), jnp.float32),
        *(((heads, slots, dim), dtype) for heads, dim in sizes.convolved),
    ]
    return tuple(by_heads(jnp.zeros((batch, *shape), kind), sizes.key_heads, mesh) for shape, kind in shapes)


def by_heads(array: jax.Array, units: int, mesh: Mesh | None) -> jax.Array:
    """An ``array [B, heads, …]`` on the ``mesh`` where it is to live: its heads divided as ``units`` heads of keys are, so that
    value heads lie beside the heads of keys that they belong to."""
    axes = ("batch", "kv_heads", *(None,) * (array.ndim - 2))
    return sharding.constrain(array, axes, {"kv_heads": units}, mesh)
