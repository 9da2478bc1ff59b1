"""Sparse attention (DeepSeek-V3.2, arXiv 2512.02556): an indexer selects the keys of each query.

A layer with an indexer stores one more key for each token, the index key. The index score of a
query t and a token s that it sees is ``sum_h w_th relu(q_th . k_s)``, over the few heads h of the
indexer. Attention then reads the ``topk`` tokens with the highest scores alone. Of equal scores,
earlier tokens are selected first, so that a selection depends on the text alone: not on how it is
divided into cache, draft and new tokens. A layer without an indexer of its own attends to the
tokens that the layer before it attends to.

All index keys are scored. Attention reads the entries of a cache in one of two ways:

- It reads all entries of a row once for all T queries, and masks those that a query has not
  selected. The bytes are those of all tokens, and the arithmetic is T times that.
- It copies the ``topk`` entries that each query has selected, and reads the copies. Both depend on
  T ``topk`` alone. Queries of one tree select many of the same tokens, but their number is not a
  shape, so each query has its own copies.

`reach` compares the two for a row, by the number of its filled slots. So a row is never read in
another way because of its neighbours. The two ways differ in rounding alone. Tokens that are in no
cache (a draft's, those of the call) are few, and always masked.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.models.attention import BLOCK, LOOP, Filled, Piece, Sparse
from specjax.models.cache import Entries, Entry
from specjax.models.config import Indexer, ModelConfig
from specjax.models.params import Params
from specjax.models.primitives import layer_norm, linear
from specjax.models.quantized_cache import Part, operand, rescaled
from specjax.models.rope import Rotations, separate_pairs

MOVES = 3
"""How often the bytes of a copied entry are moved: it is read, written, and read again."""

BALANCED_HEADS = 128
"""The number of heads for which the arithmetic of one query takes as long as reading the entries.

A head has about 2 operations for each byte of an entry in bfloat16 (2 x 1088 for 2 x 576 bytes in
DeepSeek-V3.2), and accelerators do 150 to 560 operations in the time of reading a byte
(`specjax.chips`).
"""

ATTENDED = 2
"""The number of parts of an entry that attention reads: the latent and the rotated key.

The index key comes after them.
"""

KEY_EPS = 1e-6
"""The epsilon of the norm of index keys, which the published models have in their code."""


@struct.dataclass
class Selection:
    """The tokens that each query reads, in two forms.

    Attributes:
        masks: for each piece that attention reads, ``[B, T, S]`` bool.
        tokens: ``[B, T, topk]`` int32, the indices of the same tokens in all pieces together. If a
            query reads fewer, the rest is the number of all slots.
    """

    masks: tuple[jax.Array, ...]
    tokens: jax.Array


def reach(config: ModelConfig, queries: int, devices: int = 1) -> int:
    """Return the largest number of filled slots of a row that attention reads as a whole.

    From a row with more slots it copies those that each query has selected. Times are compared in
    units of reading one entry. S entries take ``S max(1, T heads / 128)`` as a whole, by bytes or
    by arithmetic, and copies take ``3 T topk``.

    Args:
        config: the configuration of a model with an indexer.
        queries: T, the number of queries of a row.
        devices: the number of devices that share the heads.

    Examples:
        With all 128 heads of DeepSeek-V3.2 on a device, a tree of 60 nodes is like one token: it
        has more to copy, and as much more to multiply. With 16 heads on each of 8 devices, a tree
        reads up to 49 thousand slots as a whole:

        >>> from specjax.models.published import published
        >>> from specjax.models.sparse_attention import reach
        >>> model = published("deepseek-v3.2")
        >>> [reach(model, queries) for queries in (1, 60)]
        [6144, 6144]
        >>> [reach(model, queries, devices=8) for queries in (1, 60)]
        [6144, 49152]
    """
    heads = max(1, config.num_heads // devices)
    return MOVES * _sizes(config).topk * min(queries, max(1, BALANCED_HEADS // heads))


def devices_of(mesh: Mesh | None) -> int:
    """Return the number of devices that share the heads of a model."""
    return 1 if mesh is None else mesh.shape["model"]


def entries_read(
    config: ModelConfig, entries: Sequence[Entry], mesh: Mesh | None, queries: int = 1
) -> Entries:
    """Return the shapes of the entries that a pass reads of full rows.

    They are the copies that `reach` says are made for each query, or else all entries. Queries of a
    tree select many of the same tokens. These count for each query, as they are copied.

    Args:
        config: the configuration of a model, with an indexer or without.
        entries: the entries of layers of its cache, as shapes or arrays.
        mesh: the mesh of the model, or None.
        queries: T, the number of queries of a row.
    """
    if config.indexer is None:
        return tuple(entries)
    copies, whole = queries * config.indexer.topk, reach(config, queries, devices_of(mesh))

    def shape_read(part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        rows, heads, slots, *sizes = part.shape
        slots = slots if slots <= whole else min(slots, copies)
        return jax.ShapeDtypeStruct(
            (rows, heads, slots, *sizes), part.dtype, sharding=part.sharding
        )

    return tuple(
        (*jax.tree.map(shape_read, entry[:ATTENDED]), *entry[ATTENDED:]) for entry in entries
    )


def index_key(params: Params, config: ModelConfig, x: jax.Array, rotations: Rotations) -> jax.Array:
    """Return the index keys ``[B, 1, T, head_dim]`` of hidden states ``x [B, T, H]``.

    ``params`` are those of the indexer.
    """
    keys = layer_norm(linear(params, "k", x), params["k_norm"], params["k_norm_bias"], KEY_EPS)
    return _rotate(_sizes(config), keys[:, :, None], rotations).transpose(0, 2, 1, 3)


def select(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    latents: jax.Array,
    rotations: Rotations,
    pieces: Sequence[Piece],
) -> Selection | None:
    """Return which tokens of each piece the queries read.

    No gradient flows through a selection.

    Args:
        params: the parameters of the indexer.
        config: the configuration of the model.
        x: ``[B, T, H]`` the normed hidden states.
        latents: ``[B, T, q_lora_rank]`` the normed latents of the queries.
        rotations: the rotations at the tokens' positions.
        pieces: the tokens before, in the order of the text, and those of the call. Their entries
            have index keys.

    Returns:
        The selection; None if every query reads all that it sees, because there are no more than
        ``topk`` slots.
    """
    indexer = _sizes(config)
    if sum(map(_slots, pieces)) <= indexer.topk:
        return None
    x, latents, pieces = jax.lax.stop_gradient((x, latents, tuple(pieces)))
    q = linear(params, "q", latents).reshape(*x.shape[:2], indexer.heads, indexer.head_dim)
    q = _rotate(indexer, q, rotations)
    # Small differences decide, so the weights of heads are in float32, and on a TPU not rounded.
    weights = indexer.heads**-0.5 * jnp.einsum(
        "btd,dh->bth", x.astype(jnp.float32), params["weights"], precision="highest"
    )

    def score(keys: Part) -> jax.Array:
        products = jnp.einsum(
            "bthd,bsd->bths",
            q,
            operand(keys, q.dtype)[:, 0],
            preferred_element_type=jnp.float32,
        )
        products = jax.nn.relu(rescaled(products, keys, (1,)) * indexer.head_dim**-0.5)
        return jnp.einsum("bth,bths->bts", weights, products, precision="highest")

    scores = jnp.concatenate(
        [_visible_scores(score, piece, x.shape[1]) for piece in pieces], axis=-1
    )
    chosen, tokens = highest(scores, indexer.topk)
    ends = [sum(map(_slots, pieces[: i + 1])) for i in range(len(pieces) - 1)]
    return Selection(tuple(jnp.split(chosen, ends, axis=-1)), tokens)


def highest(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return which of the last axis are its ``count`` highest scores; of equal ones the first.

    A score of minus infinity is never among them.

    Returns:
        A mask of the shape of ``scores``, and the indices ``[..., count]`` of the same scores; the
        size of the axis in place of those that are missing.

    Examples:
        >>> from specjax.models.sparse_attention import highest
        >>> scores = jnp.array([[2.0, 1.0, 3.0, 1.0], [-jnp.inf, 0.0, -jnp.inf, -1.0]])
        >>> mask, indices = highest(scores, 3)
        >>> mask.tolist()
        [[True, True, True, False], [False, True, False, True]]
        >>> indices.tolist()
        [[2, 0, 1], [1, 3, 4]]
    """
    # XLA's order has -0.0 below 0.0. They are equal scores, so that the first is selected.
    scores = jnp.where(scores == 0, 0.0, scores)
    values, indices = jax.lax.top_k(scores, count)
    # Without the barrier XLA for CPUs sorts all scores: it takes the slice into its pattern of a
    # top-k. With one barrier around both results, XLA (JAX 0.10) ends the process for several
    # devices.
    lowest = jax.lax.optimization_barrier(values)[..., -1:]
    # `top_k` takes the first of equal scores. So the lowest score is taken up to the last index at
    # which it was taken.
    end = jnp.max(jnp.where(values == lowest, indices, -1), axis=-1, keepdims=True)
    is_equal = (scores == lowest) & (jnp.arange(scores.shape[-1]) <= end)
    mask = ((scores > lowest) | is_equal) & (scores > -jnp.inf)
    return mask, jnp.where(values > -jnp.inf, indices, scores.shape[-1])


def selected(
    config: ModelConfig, pieces: Sequence[Piece], selection: Selection | None
) -> list[Piece]:
    """Return the pieces as attention reads them: without index keys, and what is selected alone."""
    pieces = [_without_index_keys(piece) for piece in pieces]
    if selection is None:
        return pieces
    restricted: list[Piece] = []
    first = 0
    for piece, mask in zip(pieces, selection.masks, strict=True):
        if isinstance(piece, Filled):
            filled = replace(piece, selected=mask)
            restricted.append(_sparse(config, filled, selection.tokens - first))
        else:
            restricted.append((_few(piece)[0], mask))
        first += _slots(piece)
    return restricted


def _sparse(config: ModelConfig, filled: Filled, slots: jax.Array) -> Filled | Sparse:
    """Return how attention reads a cache, of which the queries selected ``slots [B, T, topk]``.

    Slots out of range are tokens of other pieces.
    """
    largest = reach(config, slots.shape[1], devices_of(filled.mesh))
    if filled.slots <= largest:
        return filled
    is_here = (slots >= 0) & (slots < filled.slots)
    return Sparse(filled, jnp.where(is_here, slots, 0), is_here, largest)


def _without_index_keys(piece: Piece) -> Piece:
    if isinstance(piece, Filled):
        return replace(piece, entry=piece.entry[:ATTENDED])
    entry, mask = _few(piece)
    return entry[:ATTENDED], mask


def _few(piece: Piece) -> tuple[Entry, jax.Array | None]:
    """Return a piece that is no cache: the entries of a draft or of the call, and their mask."""
    assert isinstance(piece, tuple)
    return piece


def _visible_scores(score: Callable[[Part], jax.Array], piece: Piece, queries: int) -> jax.Array:
    """Return the scores ``[B, T, S]`` of a piece, and minus infinity where a query sees nothing."""
    if isinstance(piece, Filled):
        return scores_in_blocks(score, replace(piece, entry=piece.entry[ATTENDED:]), queries)
    entry, mask = _few(piece)
    visible = jnp.eye(queries, dtype=bool)[None] if mask is None else mask
    return jnp.where(visible, score(entry[ATTENDED]), -jnp.inf)


def scores_in_blocks(score: Callable[[Part], jax.Array], filled: Filled, queries: int) -> jax.Array:
    """Return the scores ``[B, T, S]`` of a cache, minus infinity where a query sees nothing.

    Blocks without filled slots are never read. Only the scores of one block exist for each head.

    Args:
        score: returns the scores ``[B, T, width]`` of some index keys.
        filled: the cache; its entries have index keys alone.
        queries: T.
    """
    width = filled.block_width(BLOCK)

    def score_at(start: jax.Array | int) -> jax.Array:
        (keys,), visible = filled.block(start, width)
        return jnp.where(visible, score(keys), -jnp.inf)

    if width == filled.slots:
        return score_at(0)

    def add(block: jax.Array | int, scores: jax.Array) -> jax.Array:
        # The last block begins earlier, so that it ends with the cache (see `Filled.block`).
        first = jnp.minimum(block * width, filled.slots - width)
        of_block = score_at(block * width)
        if filled.slots % width:
            before = jax.lax.dynamic_slice_in_dim(scores, first, width, axis=2)
            of_block = jnp.maximum(before, of_block)
        return jax.lax.dynamic_update_slice_in_dim(scores, of_block, first, axis=2)

    empty = jnp.full((filled.count.shape[0], queries, filled.slots), -jnp.inf)
    with jax.named_scope(LOOP):
        # A count has tokens that did not fit, too. Another block would overwrite the last one.
        most = jnp.minimum(jnp.max(filled.count), filled.slots)
        return jax.lax.fori_loop(0, -(-most // width), add, empty)


def _slots(piece: Piece) -> int:
    """Return the number of tokens of a piece, filled or not."""
    return piece.slots if isinstance(piece, Filled) else _few(piece)[0][0].shape[2]


def _rotate(indexer: Indexer, x: jax.Array, rotations: Rotations) -> jax.Array:
    """Rotate the first numbers of ``x [B, T, heads, head_dim]``, as many as latent attention does.

    Interleaved pairs are separated into halves first, in queries and keys alike.
    """
    if indexer.rope_interleaved:
        x = separate_pairs(x, 2 * rotations.cos.shape[-1])
    return rotations.turn_keys(x)


def _sizes(config: ModelConfig) -> Indexer:
    assert config.indexer is not None
    return config.indexer
