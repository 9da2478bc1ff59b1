"""Sparse attention (DeepSeek-V3.2, arXiv 2512.02556): an indexer selects the keys of each query.

A layer with an indexer stores one more key for each token, the index key. The index score of a
query t and a token s that it sees is ``sum_h w_th relu(q_th . k_s)``, over the few heads h of the
indexer. Attention then reads the ``topk`` tokens with the highest scores alone. Of equal scores,
earlier tokens are selected first, so that a selection depends on the text alone: not on how it is
divided into cache, draft and new tokens. A layer without an indexer of its own attends to the
tokens that the layer before it attends to.

All index keys are scored, and attention is masked. So the arithmetic of attention is that of all
tokens, and only the result is that of the selected ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from specjax.models.attention import BLOCK, Filled, Piece, Shared
from specjax.models.config import Indexer, ModelConfig
from specjax.models.params import Params
from specjax.models.primitives import layer_norm, linear
from specjax.models.quantized_cache import Part, operand, rescaled
from specjax.models.rope import Rotations, separate_pairs

Selection = tuple[jax.Array, ...]
"""For each piece that attention reads, ``[B, T, S]`` bool: the tokens that each query reads."""

ATTENDED = 2
"""The number of parts of an entry that attention reads: the latent and the rotated key.

The index key comes after them.
"""

KEY_EPS = 1e-6
"""The epsilon of the norm of index keys, which the published models have in their code."""


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

    scores = [_visible_scores(score, piece, x.shape[1]) for piece in pieces]
    chosen = highest(jnp.concatenate(scores, axis=-1), indexer.topk)
    ends = [sum(map(_slots, pieces[: i + 1])) for i in range(len(pieces) - 1)]
    return tuple(jnp.split(chosen, ends, axis=-1))


def highest(scores: jax.Array, count: int) -> jax.Array:
    """Return which of the last axis are its ``count`` highest scores; of equal ones the first.

    A score of minus infinity is never among them.

    Examples:
        >>> from specjax.models.sparse_attention import highest
        >>> highest(jnp.array([[2.0, 1.0, 3.0, 1.0], [-jnp.inf, 0.0, -jnp.inf, -1.0]]), 3).tolist()
        [[True, True, True, False], [False, True, False, True]]
    """
    # Without the barrier XLA sorts all scores: it takes the slice into its pattern of a top-k.
    last = jax.lax.optimization_barrier(jax.lax.top_k(scores, count)[0])[..., -1:]
    above, equal = scores > last, (scores == last) & (scores > -jnp.inf)
    room = count - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= room))


def selected(pieces: Sequence[Piece], selection: Selection | None) -> list[Piece]:
    """Return the pieces as attention reads them: without index keys, and what is selected alone."""
    return [
        _restricted(piece, None if selection is None else selection[i])
        for i, piece in enumerate(pieces)
    ]


def _restricted(piece: Piece, tokens: jax.Array | None) -> Piece:
    assert not isinstance(piece, Shared)
    if isinstance(piece, Filled):
        return replace(piece, entry=piece.entry[:ATTENDED], selected=tokens)
    entry, mask = piece
    return entry[:ATTENDED], mask if tokens is None else tokens


def _visible_scores(score: Callable[[Part], jax.Array], piece: Piece, queries: int) -> jax.Array:
    """Return the scores ``[B, T, S]`` of a piece, and minus infinity where a query sees nothing."""
    assert not isinstance(piece, Shared)
    if isinstance(piece, Filled):
        return _scores_in_blocks(score, replace(piece, entry=piece.entry[ATTENDED:]), queries)
    entry, mask = piece
    visible = jnp.eye(queries, dtype=bool)[None] if mask is None else mask
    return jnp.where(visible, score(entry[ATTENDED]), -jnp.inf)


def _scores_in_blocks(
    score: Callable[[Part], jax.Array], filled: Filled, queries: int
) -> jax.Array:
    """Return the scores of a cache, of which blocks without filled slots are never read.

    Only the scores of one block exist for each head.
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
        before = jax.lax.dynamic_slice_in_dim(scores, first, width, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(
            scores, jnp.maximum(before, score_at(block * width)), first, axis=2
        )

    empty = jnp.full((filled.count.shape[0], queries, filled.slots), -jnp.inf)
    return jax.lax.fori_loop(0, -(-jnp.max(filled.count) // width), add, empty)


def _slots(piece: Piece) -> int:
    """Return the number of tokens of a piece, filled or not."""
    assert not isinstance(piece, Shared)
    return piece.slots if isinstance(piece, Filled) else piece[0][0].shape[2]


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
