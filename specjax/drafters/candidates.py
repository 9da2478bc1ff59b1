"""Children of drafted nodes: likeliest tokens, drawn tokens, or tokens coupled to the target's."""

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafts.shapes import Chain, DraftShape, SampledTree
from specjax.sampling import (
    RowSampling,
    argmax,
    before_temperature,
    draw,
    likeliest,
    noise_of_rows,
    perturbed,
    probabilities,
)

NO_CANDIDATE = -1
"""The id in the place of a token that was looked up and does not exist."""

_BEHIND_ALL = -1e4  # far below every logit plus noise: a probability of 0


@struct.dataclass
class CandidateTokens:
    """The children of some nodes: n nodes per row, k children each.

    Attributes:
        tokens: ``[B, n, k]``, token ids of the target.
        scores: ``[B, n, k]``, see `_children`.
        q: ``[B, n, V]``, the distribution that the children were drawn from, in the drafter's
            vocabulary or over the `Candidates` of their depth; None if they were chosen.
        confidence: ``[B, n]``, the probability of the first child, by which a chain may stop early;
            None if no chain may.
    """

    tokens: jax.Array
    scores: jax.Array
    q: jax.Array | None
    confidence: jax.Array | None


@struct.dataclass
class Vocabulary:
    """The vocabulary of a drafter that has fewer tokens than the target.

    Its logits are ``[..., Vd]``.

    Attributes:
        ids: ``[Vd]`` int32, the target's id of each of the drafter's tokens. All are different.
        size: static, the number of the target's tokens, V.
    """

    ids: jax.Array
    size: int = struct.field(pytree_node=False)

    def names(self, tokens: jax.Array) -> jax.Array:
        """Return the target's ids ``[...]`` of the drafter's ``tokens [...]``."""
        return self.ids[tokens]

    def noise(self, numbers: jax.Array) -> jax.Array:
        """Select the values ``[..., Vd]`` of the drafter's tokens from ``numbers [..., V]``."""
        return jnp.take(numbers, self.ids, axis=-1)

    def widen(self, q: jax.Array) -> jax.Array:
        """Return the distributions ``q [..., Vd]`` over the target's tokens, as ``[..., V]``."""
        return (
            jnp.zeros((*q.shape[:-1], self.size), q.dtype)
            .at[..., self.ids]
            .set(q, unique_indices=True)
        )


@struct.dataclass
class Candidates:
    """The only tokens that can come next, K of the target's V, different ones in each row.

    It takes the place of a `Vocabulary`.

    Attributes:
        ids: ``[B, K]`` int32, ids of the target's tokens. All ids of a row are different.
        size: static, the number of the target's tokens, V.
    """

    ids: jax.Array
    size: int = struct.field(pytree_node=False)

    def names(self, tokens: jax.Array) -> jax.Array:
        """Return the target's ids of candidates.

        ``tokens [B, n, k]`` are their indices in ``ids``.
        """
        return jax.vmap(lambda ids, tokens: ids[tokens])(self.ids, tokens)

    def noise(self, numbers: jax.Array) -> jax.Array:
        """Select the values ``[B, n, K]`` of the candidates from ``numbers [B, n, V]``."""
        return jnp.take_along_axis(numbers, self.ids[:, None], axis=-1)


def offered_by(
    shape: DraftShape,
    logits: jax.Array,
    depth: jax.Array,
    sampling: RowSampling,
    keys: jax.Array,
    vocabulary: Vocabulary | Candidates | None,
    path: jax.Array | None = None,
) -> CandidateTokens:
    """Return the children of nodes with the drafter's ``logits [B, n, V]``.

    Consumes the row keys ``[B]``.

    Args:
        shape: the shape of the draft.
        logits: the logits, in the drafter's vocabulary or over `Candidates`.
        depth: the depth of the nodes, as in `specjax.sampling.without_stop_tokens`.
        sampling: the sampling parameters of the rows.
        keys: the random keys of this depth.
        vocabulary: the vocabulary of the logits, if it is not the target's.
        path: ``[B, n, K]``, the tokens from below the root to each node, as in
            `specjax.sampling.before_temperature`; None if they are unknown.
    """
    is_drawn = (
        isinstance(shape, Chain | SampledTree) and not sampling.greedy and not sampling.coupled
    )
    logits = before_temperature(
        logits.astype(jnp.float32),
        sampling,
        depth,
        path=path,
        ids=None if vocabulary is None else vocabulary.ids,
    )
    if sampling.coupled:
        # With the noise of the target's own draw added, the largest logit is the token that the
        # drafter would draw with the same random numbers. If truncation leaves fewer tokens than
        # there are children, the next likely ones follow: the target may truncate less.
        noise = noise_of_rows(
            keys, logits.shape[-1] if vocabulary is None else vocabulary.size, sampling
        )[:, None]
        noise = noise if vocabulary is None else vocabulary.noise(noise)
        logits = perturbed(logits, sampling, noise, beyond=_BEHIND_ALL)
    tokens, scores, q = _children(logits, shape.branching, sampling if is_drawn else None, keys)
    confidence = None
    if isinstance(shape, Chain) and shape.stop_below:
        confidence = _confidence(logits[:, 0], q, tokens[:, 0, 0], sampling)[:, None]
    return CandidateTokens(
        tokens if vocabulary is None else vocabulary.names(tokens), scores, q, confidence
    )


def ranked(
    shape: DraftShape,
    tokens: jax.Array,
    logprobs: jax.Array,
    depth: jax.Array | int,
    sampling: RowSampling,
    keys: jax.Array,
    vocab: int,
    path: jax.Array | None,
) -> CandidateTokens:
    """Return the best children among tokens that were looked up: k for each of n nodes.

    Args:
        shape: the shape of the draft. Its ``branching`` must be at most k.
        tokens: ``[B, n, k]``, the tokens; `NO_CANDIDATE` where there is none.
        logprobs: ``[B, n, k]`` float32, estimates of their log-probabilities.
        depth: the depth of the nodes, as in `specjax.sampling.without_stop_tokens`.
        sampling: the sampling parameters of the rows.
        keys: ``[B]``, the random keys of this depth. They are used with coupled sampling alone.
        vocab: the number of the target's tokens.
        path: ``[B, n, D]``, the tokens from below the root to each node, as in
            `specjax.sampling.before_temperature`; None if they are unknown.

    Returns:
        The children, the best first. One that does not exist is `NO_CANDIDATE`, with score -inf.
    """
    batch, nodes, count = tokens.shape
    ids, missing = jnp.maximum(tokens, 0), tokens == NO_CANDIDATE
    # Each node has ids of its own, and so it is passed as a row of its own.
    scores = before_temperature(
        logprobs.reshape(batch * nodes, 1, count),
        jax.tree.map(lambda values: jnp.repeat(values, nodes, axis=0), sampling),
        depth,
        path=None if path is None else path.reshape(batch * nodes, 1, -1),
        ids=ids.reshape(batch * nodes, count),
    ).reshape(tokens.shape)
    if sampling.coupled:
        # As in `offered_by`: with the noise of the target's own draw.
        noise = noise_of_rows(keys, vocab, sampling)
        at_ids = jnp.take_along_axis(noise, ids.reshape(batch, -1), axis=1).reshape(ids.shape)
        scores = perturbed(jnp.where(missing, _BEHIND_ALL, scores), sampling, at_ids, _BEHIND_ALL)
        scores -= jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    # Biases may raise a score above 0, but no child may be better than its parent.
    scores = jnp.where(missing, -jnp.inf, jnp.minimum(scores, 0.0))
    best, order = jax.lax.top_k(scores, shape.branching)
    tokens = jnp.take_along_axis(tokens, order, axis=-1)
    confidence = None
    if isinstance(shape, Chain) and shape.stop_below:
        confidence = jnp.exp(best[..., 0])
    return CandidateTokens(
        tokens=jnp.where(best > -jnp.inf, tokens, NO_CANDIDATE),
        scores=best,
        q=None,
        confidence=confidence,
    )


def _children(
    logits: jax.Array, count: int, sampling: RowSampling | None, keys: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Choose or draw ``count`` children for each node.

    Consumes the row keys.

    Args:
        logits: ``[B, n, V]``, the drafter's logits.
        count: the number of children of a node, k.
        sampling: the sampling parameters to draw with; None chooses the likeliest tokens.
        keys: ``[B]``, the random keys.

    Returns:
        The tokens ``[B, n, k]``, their scores ``[B, n, k]``, and q ``[B, n, V]``. The score of a
        chosen token is its log-probability in the softmax of ``logits``, at temperature 1. With
        coupled sampling the logits have the noise added, and the score says how likely the target
        is to draw the token as well. The score of a drawn token is 0, or -inf if q has no further
        token to draw.
    """
    batch, nodes, vocab = logits.shape
    if sampling is None:
        if count == 1:
            token = argmax(logits)[..., None]
            return token, jnp.zeros(token.shape, jnp.float32), None
        best, tokens = likeliest(logits, count)
        return tokens, best - jax.nn.logsumexp(logits, axis=-1, keepdims=True), None
    q = probabilities(logits, sampling)
    if count == 1:
        if nodes == 1:
            node_keys = keys
        else:
            node_keys = jax.vmap(lambda key: jax.random.split(key, nodes))(keys).reshape(-1)
        token = draw(q.reshape(-1, vocab), node_keys).reshape(batch, nodes, 1)
        return token, jnp.zeros(token.shape, jnp.float32), q
    # Gumbel top-k: the k largest of log q + Gumbel noise, in order, are k draws without replacement
    # (Kool et al. 2019, arXiv 1903.06059). A greedy row takes the k likeliest; its q is one-hot.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (nodes, vocab), jnp.float32, mode="high"))(
        keys
    )
    greedy = (sampling.temperature == 0)[:, None, None]
    scores, tokens = likeliest(jnp.where(greedy, logits, jnp.log(q) + noise), count)
    return tokens, jnp.where(scores > -jnp.inf, 0.0, -jnp.inf), q


def _confidence(
    logits: jax.Array, q: jax.Array | None, token: jax.Array, sampling: RowSampling
) -> jax.Array:
    """Return the probability of ``token [B]`` in the distribution that it was drawn from.

    Rows that choose their token have no such distribution, or a one-hot one if they are greedy: for
    them it is the probability at temperature 1.
    """
    chosen = jnp.exp(_at(logits, token) - jax.nn.logsumexp(logits, axis=-1))
    return (
        chosen if q is None else jnp.where(sampling.temperature == 0, chosen, _at(q[:, 0], token))
    )


def _at(values: jax.Array, token: jax.Array) -> jax.Array:
    """Return the value ``[B]`` of each row's ``token [B]`` in ``values [B, V]``."""
    return jnp.take_along_axis(values, token[:, None], axis=1)[:, 0]
