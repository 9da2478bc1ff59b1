"""What is attended to, in pieces: the slots of a cache, the scratch of a draft, and what a call adds itself."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.models.cache import Entry

BLOCK = 512
"""Slots of a short cache that are attended to at a time; see `block_width`."""

LOOP = "cache_blocks"
"""What the loop over them is called in a compiled program."""


def block_width(slots: int, block: int) -> int:
    """How many slots of a cache with ``slots`` are attended to at a time; ``block`` of a short one.

    The last block is read whole, however few of its slots are filled: so only a long cache has wider ones.
    """
    return min(slots, block if slots < 8 * block else 2 * block)


@struct.dataclass
class Filled:
    """The slots of a cache, as attention reads them.

    Attributes:
        entry: ``[B, heads, S, dim]`` each part.
        count: ``[B]`` how many slots of each row hold something: the first ones.
        since: ``[B|1, T|1]`` the first slot that each query sees. None: all see all that is filled.
        mesh: static, where the entry lives.
    """

    entry: Entry
    count: jax.Array
    since: jax.Array | None = None
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    @property
    def slots(self) -> int:
        """Slots of a row, S."""
        return self.entry[0].shape[2]

    def block(self, start: jax.Array | int, width: int) -> tuple[Entry, jax.Array]:
        """The entries of ``width`` slots that include those from ``start`` on, and ``[B, T|1, width]`` bool, which are visible.

        The last block of a cache begins earlier than asked, so that it ends with the cache; what an earlier block has shown is
        hidden in it.
        """
        first = jnp.minimum(start, self.slots - width)
        number = first + jnp.arange(width)
        visible = (number < self.count[:, None])[:, None] & (number >= start)
        if self.since is not None:
            visible &= number >= self.since[..., None]
        return jax.tree.map(lambda part: jax.lax.dynamic_slice_in_dim(part, first, width, axis=2), self.entry), visible


Piece = tuple[Entry, jax.Array | None] | Filled
"""What one layer remembers of some tokens, to attend to, and ``[B|1, T|1, S]`` bool, which of them each query sees. None: there
is one for each query, its own, and it sees no other. Or the slots of a cache."""
