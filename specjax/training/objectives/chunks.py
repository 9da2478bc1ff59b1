"""Computations over the positions of windows, chunk by chunk: the logits are never all in memory.

The logits of a window take far more memory than its hidden states: 2,048 positions of a vocabulary
of 151,936 tokens take 1.2 GB in float32, and a loss holds several arrays of that size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

CHUNK_BYTES = 2**29
"""The bound of one float32 array of a chunk on each device, in bytes.

A loss holds some five such arrays at a time. A chunk still has hundreds of tokens at the
vocabularies of published models, so that its products are limited by arithmetic.
"""


def width_of(rows: int, count: int, numbers: int, mesh: Mesh | None = None) -> int:
    """Return the number of positions of a chunk.

    It is ``count`` if that is within the bound, otherwise a power of two.

    Args:
        rows: the number of windows.
        count: the number of positions of each.
        numbers: the numbers that are computed for one position, such as the size of the vocabulary.
        mesh: the mesh that splits them.

    Examples:
        >>> from specjax.training.objectives.chunks import width_of
        >>> width_of(rows=8, count=2048, numbers=151_936)
        64
        >>> width_of(rows=8, count=512, numbers=3072)
        512
    """
    devices = 1 if mesh is None else mesh.size
    most = max(CHUNK_BYTES * devices // (4 * rows * numbers), 1)
    return count if count <= most else 2 ** (most.bit_length() - 1)


def by_chunks(
    function: Callable[..., Any],
    arrays: Sequence[Any],
    numbers: int,
    mesh: Mesh | None = None,
    widest: int | None = None,
    student: Any = None,
) -> Any:
    """Return ``function(*arrays)``, computed for one chunk of positions after the other.

    If one chunk is enough, it is a plain call. Otherwise each chunk is computed again for the
    gradient (`jax.checkpoint`), so that neither pass holds more than one chunk. The gradients of a
    ``student`` are summed over the chunks in float32: sums of its own type would be rounded once
    for each chunk.

    Args:
        function: maps pytrees of arrays ``[B, n, ...]`` to a pytree of arrays ``[B, n, ...]``. It
            must treat all positions alike.
        arrays: pytrees of arrays ``[B, N, ...]``.
        numbers: see `width_of`.
        mesh: see `width_of`.
        widest: the most positions of a chunk; None for any number.
        student: the weights that are trained, or None. They are the first argument of ``function``.

    Examples:
        >>> from specjax.training.objectives.chunks import by_chunks
        >>> states, _ = target.read(prompts)
        >>> total = by_chunks(
        ...     lambda hidden: jax.nn.logsumexp(target.head(hidden), axis=-1),
        ...     (states.hidden,),
        ...     numbers=target.config.vocab_size,
        ... )
        >>> total.shape
        (2, 6)
    """
    arrays = tuple(arrays)
    weights = () if student is None else (student,)
    rows, count = jax.tree.leaves(arrays)[0].shape[:2]
    width = min(width_of(rows, count, numbers, mesh), widest or count)
    if width >= count:
        return function(*weights, *arrays)
    chunks = -(-count // width)

    def split(array: jax.Array) -> jax.Array:
        # The last position fills up the last chunk: its values are valid inputs of any function.
        padding = [(0, 0), (0, chunks * width - count)] + [(0, 0)] * (array.ndim - 2)
        padded = jnp.pad(array, padding, mode="edge")
        return jnp.moveaxis(padded.reshape(rows, chunks, width, *array.shape[2:]), 1, 0)

    def join(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array, 0, 1).reshape(rows, -1, *array.shape[3:])[:, :count]

    wide = jax.tree.map(_widened, weights)

    @jax.checkpoint
    def of_chunk(wide: Any, chunk: tuple[Any, ...]) -> Any:
        narrow = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), wide, weights)
        return function(*narrow, *chunk)

    values = jax.lax.map(partial(of_chunk, wide), jax.tree.map(split, arrays))
    return jax.tree.map(join, values)


def _widened(leaf: jax.Array) -> jax.Array:
    is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
    return leaf.astype(jnp.float32) if is_narrow else leaf
