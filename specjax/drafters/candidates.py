"""The children that nodes of a draft offer: the likeliest tokens, drawn ones, or ones coupled to the target's draws."""

import jax
import jax.numpy as jnp
from flax import struct

from specjax.drafts.shapes import Chain, DraftShape, SampledTree
from specjax.sampling import RowSampling, argmax, draw, likeliest, noise_of_rows, perturbed, probabilities, without_stop_tokens

_BEHIND_ALL = -1e4  # larger than logits and noise together; a probability of 0


@struct.dataclass
class CandidateTokens:
    """The children that nodes offer, n nodes a row and k children each.

    Attributes:
        tokens: ``[B, n, k]`` the target's ids.
        scores: ``[B, n, k]`` see `_children`.
        q: ``[B, n, V]`` in the drafter's vocabulary, or over the `Candidates` of their depth, what they were drawn from; None
            where they were chosen.
        confidence: ``[B, n]`` the probability of the first one, by which chains end; None where none does.
    """

    tokens: jax.Array
    scores: jax.Array
    q: jax.Array | None
    confidence: jax.Array | None


@struct.dataclass
class Vocabulary:
    """A drafter's own vocabulary, smaller than the target's. Its logits are ``[..., Vd]``.

    Attributes:
        ids: ``[Vd]`` int32, the target's id of each of its tokens; no two alike.
        size: static, the target's V.
    """

    ids: jax.Array
    size: int = struct.field(pytree_node=False)

    def names(self, tokens: jax.Array) -> jax.Array:
        """Return the target's ids ``[...]`` of the drafter's ``tokens [...]``."""
        return self.ids[tokens]

    def noise(self, numbers: jax.Array) -> jax.Array:
        """Return those ``[..., Vd]`` of ``numbers [..., V]`` that belong to the drafter's tokens."""
        return jnp.take(numbers, self.ids, axis=-1)

    def widen(self, q: jax.Array) -> jax.Array:
        """Return the distributions ``q [..., Vd]`` over the target's tokens, ``[..., V]``."""
        return jnp.zeros((*q.shape[:-1], self.size), q.dtype).at[..., self.ids].set(q, unique_indices=True)


@struct.dataclass
class Candidates:
    """Few tokens, K of the target's V, the only ones that can come next: each row's own. In place of a `Vocabulary`.

    Attributes:
        ids: ``[B, K]`` int32, the target's ids; no two of a row alike.
        size: static, the target's V.
    """

    ids: jax.Array
    size: int = struct.field(pytree_node=False)

    def names(self, tokens: jax.Array) -> jax.Array:
        """Return the target's ids ``[B, n, k]`` of the candidates with the numbers ``tokens [B, n, k]``."""
        return jax.vmap(lambda ids, tokens: ids[tokens])(self.ids, tokens)

    def noise(self, numbers: jax.Array) -> jax.Array:
        """Return those ``[B, n, K]`` of ``numbers [B, n, V]`` that belong to the candidates."""
        return jnp.take_along_axis(numbers, self.ids[:, None], axis=-1)


def offered_by(
    shape: DraftShape,
    logits: jax.Array,
    depth: jax.Array,
    sampling: RowSampling,
    keys: jax.Array,
    vocabulary: Vocabulary | Candidates | None,
) -> CandidateTokens:
    """Return the children that nodes with the drafter's ``logits [B, n, V]`` offer; consumes the row keys ``[B]``.

    Args:
        shape: of the draft.
        logits: in the drafter's vocabulary, or of `Candidates`.
        depth: of the nodes, as in `without_stop_tokens`.
        sampling: the rows' settings.
        keys: of the depth.
        vocabulary: of the logits, where it is not the target's.
    """
    is_drawn = isinstance(shape, Chain | SampledTree) and not sampling.greedy and not sampling.coupled
    logits = without_stop_tokens(logits.astype(jnp.float32), sampling, depth, None if vocabulary is None else vocabulary.ids)
    if sampling.coupled:
        # Likeliest is now what the drafter would draw with the numbers that the target draws with. Where truncation leaves
        # fewer tokens than there are children, the next likely ones follow: the target may keep what the drafter does not.
        noise = noise_of_rows(keys, logits.shape[-1] if vocabulary is None else vocabulary.size, sampling)[:, None]
        noise = noise if vocabulary is None else vocabulary.noise(noise)
        logits = perturbed(logits, sampling, noise, beyond=_BEHIND_ALL)
    tokens, scores, q = _children(logits, shape.branching, sampling if is_drawn else None, keys)
    confidence = None
    if isinstance(shape, Chain) and shape.stop_below:
        confidence = _confidence(logits[:, 0], q, tokens[:, 0, 0], sampling)[:, None]
    return CandidateTokens(tokens if vocabulary is None else vocabulary.names(tokens), scores, q, confidence)


def _children(
    logits: jax.Array, count: int, sampling: RowSampling | None, keys: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Choose or draw the ``count`` children of nodes with ``logits [B, n, V]``; consumes the row keys.

    Args:
        logits: the drafter's.
        count: k.
        sampling: how to draw; None chooses the likeliest tokens.
        keys: ``[B]``.

    Returns:
        ``[B, n, k]`` tokens, ``[B, n, k]`` their scores, -inf where q has no further token to draw, and the q ``[B, n, V]``.
        The score of a chosen token is its log probability in the softmax of ``logits``: the drafter's own, at temperature 1, or
        with coupled sampling that of the perturbed ones, which says how likely the target is to draw it, too.
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
        node_keys = keys if nodes == 1 else jax.vmap(lambda key: jax.random.split(key, nodes))(keys).reshape(-1)
        token = draw(q.reshape(-1, vocab), node_keys).reshape(batch, nodes, 1)
        return token, jnp.zeros(token.shape, jnp.float32), q
    # Gumbel top-k: the k largest of log q + Gumbel noise are a draw of k without replacement, in their order (Kool et al. 2019,
    # arXiv 1903.06059). A greedy row takes the k likeliest, and its q is one-hot.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (nodes, vocab), jnp.float32, mode="high"))(keys)
    greedy = (sampling.temperature == 0)[:, None, None]
    scores, tokens = likeliest(jnp.where(greedy, logits, jnp.log(q) + noise), count)
    return tokens, jnp.where(scores > -jnp.inf, 0.0, -jnp.inf), q


def _confidence(logits: jax.Array, q: jax.Array | None, token: jax.Array, sampling: RowSampling) -> jax.Array:
    """Return the probability of ``token [B]``: as it was drawn; for greedy rows, whose q is one-hot, at temperature 1."""
    chosen = jnp.exp(_at(logits, token) - jax.nn.logsumexp(logits, axis=-1))
    return chosen if q is None else jnp.where(sampling.temperature == 0, chosen, _at(q[:, 0], token))


def _at(values: jax.Array, token: jax.Array) -> jax.Array:
    """Return the value ``[B]`` of each row's ``token [B]`` in ``values [B, V]``."""
    return jnp.take_along_axis(values, token[:, None], axis=1)[:, 0]
