"""The states of fixed size that some layers keep of a text.

These are layers with linear attention, Mamba-2 or a short convolution.
"""

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
from specjax.models.memory import StateSizes


@struct.dataclass
class State:
    """The state of one layer after the committed tokens of B rows.

    It cannot be rolled back to fewer tokens. So a drafted token is not written into it before it is
    accepted: until then it has an entry, as in other layers, but with other parts (`empty_nodes`).

    Attributes:
        table: ``[B, value_heads, key_dim, value_dim]`` float32, the state of the rule. None if the
            layer has a convolution and no rule.
        newest: the convolution's inputs from the newest tokens, the newest last: for each of
            `StateSizes.convolved` ``[B, heads, kernel_size - 1, dim]``.
        node_parts: static. How many parts of a drafted token's entry the rule has; the inputs of
            the convolution follow.
    """

    table: jax.Array | None
    newest: tuple[jax.Array, ...]
    node_parts: int = struct.field(pytree_node=False)

    @classmethod
    def zeros(
        cls, sizes: StateSizes, batch: int, dtype: DTypeLike, mesh: Mesh | None = None
    ) -> "State":
        """Return the state of empty rows; ``dtype`` is the type of the activations."""

        def zeros(heads: int, *shape: int, dtype: DTypeLike) -> jax.Array:
            return by_heads(jnp.zeros((batch, heads, *shape), dtype), sizes.key_heads, mesh)

        table = None if sizes.table is None else zeros(*sizes.table, dtype=jnp.float32)
        newest = tuple(
            zeros(heads, sizes.kernel - 1, dim, dtype=dtype) for heads, dim in sizes.convolved
        )
        return cls(table, newest, len(sizes.node))

    def append(self, entry: Sequence[Any], count: Int[Array, " B"]) -> "State":
        """Return the state after the first ``count [B]`` of each row's tokens.

        ``entry`` is the tokens' entry that a pass has returned, in order.
        """
        parts, convolved = self.split(entry)
        table = self.table
        if table is not None:
            table = delta_rule.write(table, delta_rule.Node(*parts), count)
        return self.after(table, convolved, count)

    def split(self, entry: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the parts of an entry that are the rule's, and the inputs of the convolution."""
        return entry[: self.node_parts], entry[self.node_parts :]

    def after(
        self, table: jax.Array | None, convolved: Sequence[jax.Array], count: Int[Array, " B"]
    ) -> "State":
        """Return the state with a later ``table``; the other arguments are as in `newest_after`."""
        return State(table, self.newest_after(convolved, count), self.node_parts)

    def take(
        self, update: "Sequence[Any] | State", count: Int[Array, " B"]
    ) -> "tuple[tuple[Any, ...], State]":
        """Return the parts of a layer's update that go into slots, and the state after it.

        The update is the entry of the layer's tokens, whose last parts concern the state. Or the
        layer has committed ``count`` tokens itself: the new state replaces those parts.
        """
        if isinstance(update, State):
            return (), update
        if isinstance(update[-1], State):
            return tuple(update[:-1]), update[-1]
        first = len(update) - self.node_parts - len(self.newest)
        return tuple(update[:first]), self.append(update[first:], count)

    def newest_after(
        self, convolved: Sequence[jax.Array], count: Int[Array, " B"]
    ) -> tuple[jax.Array, ...]:
        """Return ``newest`` after the first ``count [B]`` of some tokens.

        ``convolved`` are their inputs of the convolution, ``[B, heads, n, dim]`` each.
        """
        joined = (
            jnp.concatenate([old, new.astype(old.dtype)], 2)
            for old, new in zip(self.newest, convolved, strict=True)
        )
        return tuple(_after(tokens, count, self.newest[0].shape[2]) for tokens in joined)


def _after(tokens: jax.Array, count: jax.Array, num_kept: int) -> jax.Array:
    """Return the newest tokens, ``[B, heads, num_kept, dim]``, when ``count [B]`` of n count.

    ``tokens`` is ``[B, heads, num_kept + n, dim]``.
    """
    indices = count[:, None] + jnp.arange(num_kept)[None]
    return jnp.take_along_axis(tokens, indices[:, None, :, None], axis=2)


def empty_nodes(
    sizes: StateSizes, batch: int, slots: int, dtype: DTypeLike, mesh: Mesh | None = None
) -> tuple[jax.Array, ...]:
    """Return zeros for the entries of ``slots`` drafted tokens of each row.

    The parts have slots as the third axis, like all entries: those of `StateSizes.node`, and the
    inputs of the convolution. The latter are in the ``dtype`` of the activations.
    """
    shapes = [
        ((heads, slots, *shape), jnp.float32 if in_float32 else dtype)
        for heads, shape, in_float32 in sizes.node
    ] + [((heads, slots, dim), dtype) for heads, dim in sizes.convolved]
    return tuple(
        by_heads(jnp.zeros((batch, *shape), kind), sizes.key_heads, mesh) for shape, kind in shapes
    )


def by_heads(array: jax.Array, units: int, mesh: Mesh | None) -> jax.Array:
    """Return an array ``[B, heads, …]`` on its devices of the mesh.

    Its heads are divided as ``units`` key heads are, so that value heads are on the device of their
    key heads.
    """
    axes = ("batch", "kv_heads", *(None,) * (array.ndim - 2))
    return sharding.constrain(array, axes, {"kv_heads": units}, mesh)
