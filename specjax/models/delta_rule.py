"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464), over chains and over trees of tokens.

A head keeps a state ``S [dk, dv]``: a table that maps keys to values. A token lets a share of it
decay, and then writes the part of its value that the table did not return already::

    S' = alpha S + k u^T        u = beta (v - alpha S^T k)        y = S'^T q

with the key k (of length 1), the value v, the query q, and two gates from 0 to 1: alpha, the share
of the state that remains, and beta, the share that is written. ``u`` is the *update* of the token.

Token by token this is a loop. Several tokens are computed at once as follows, where S0 is the state
before all of them. They may be a chain or a tree; ``anc(n)`` are the ancestors of n, and g_n is the
product of the alphas from S0 to n along its path::

    u_n + beta_n sum_a (g_n / g_a) (k_a . k_n) u_a  =  beta_n (v_n - g_n S0^T k_n)  a in anc(n)
    y_n  =  g_n S0^T q_n + sum_a (g_n / g_a) (k_a . q_n) u_a                        a in anc(n) or n

Ancestors come before their descendants, so the first line is a triangular system of equations. The
state is read once for any number of tokens, and never written. The entry of a token is k, u and
alpha, and the inputs of the convolution before the rule: about a fiftieth of the size of a state.
The entries of the accepted path are later written into the state::

    S  =  g_m S0 + sum_a (g_m / g_a) k_a u_a^T    with m its end, and a in anc(m) or m

In a simpler rule the update of a token is its value times a step, ``u = step v`` (Mamba-2, see
`specjax.models.mamba2`). It depends on no other token, so there is no system of equations. An entry
has v and the step, since v may be in bfloat16, where the product would be rounded. All else is the
same.

In Kimi Delta Attention (Kimi Linear, arXiv 2510.26692) each row of the table has an own alpha::

    S' = diag(alpha) S + k u^T        u = beta (v - (diag(alpha) S)^T k)

The equations above hold with a g for each row: ``(g_n / g_a) (k_a . k_n)`` becomes the sum over
rows of ``(g_n / g_a) k_a k_n``. That is no product of matrices, so a chunk is shorter, and a large
tree is computed for a few of its nodes at a time.

Everything is computed in float32. The logarithm of a share g_n / g_a is a difference of two sums
along paths. A plain difference would lose digits: a head may forget everything at some tokens and
hardly anything at others, so the sums reach thousands, and a small difference of them would be
accurate to only one part in ten thousand. So each logarithm is divided into a multiple of 1/64 and
the rest (`_path_sums`): sums of the first parts are exact, and those of the second ones are small.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64
"""The number of tokens of a chain that are computed at once.

The system of equations grows with its square.
"""

CHUNK_OF_ROWS = 16
"""The same where each row of a table decays by itself.

The shares that remain are an array for each row then, with the square of this number.
"""

PAIRS_AT_ONCE = CHUNK_OF_ROWS**2
"""The pairs of tokens for which the shares of all rows are computed at a time.

One token and all that it sees are computed at once, even if they are more.
"""

_FORGOTTEN = -1e9
"""The logarithm of a share of nothing: its exponential is 0."""

_LEAST_LOG = -104.0
"""Lower logarithms are raised to this one, whose exponential is 0 in float32, too."""

_MOST_TOKENS = 2520
"""The number of tokens of which `_path_sums` is exact.

Their logarithms add up to at least -2^18, and float32 has all multiples of 1/64 up to 2^18.
"""

_EXACT = jax.lax.Precision.HIGHEST
"""The precision of matrix products: "float32" on an accelerator is less by default."""


class DeltaRuleInputs(NamedTuple):
    """The rule's inputs for T tokens, with r value heads for each key head.

    They are in float32. With ``step`` the vectors q, k and v may have another type.

    Attributes:
        q: ``[B, heads, T, dk]`` queries, scaled.
        k: ``[B, heads, T, dk]`` keys, of length 1.
        v: ``[B, heads * r, T, dv]`` values.
        beta: ``[B, heads * r, T]`` the share that each token writes. None: each writes its value
            times ``step``, whatever the state returns for its key.
        log_alpha: ``[B, heads * r, T]`` the logarithm of the share of the state that remains; or
            ``[B, heads, T, dk]`` with r = 1, that of each row of the state.
        step: ``[B, heads * r, T]`` the factor of the values, in place of ``beta``.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array | None
    log_alpha: jax.Array
    step: jax.Array | None = None


class Node(NamedTuple):
    """The entries of tokens that were read, but are not in the state.

    Attributes:
        k: ``[B, heads, n, dk]`` as in `DeltaRuleInputs`.
        u: ``[B, heads * r, n, dv]`` their updates; with ``step`` their values.
        log_alpha: ``[B, heads * r, n]`` as in `DeltaRuleInputs`.
        step: ``[B, heads * r, n]`` as in `DeltaRuleInputs`; None if the rule has none.
    """

    k: jax.Array
    u: jax.Array
    log_alpha: jax.Array
    step: jax.Array | None = None

    @property
    def parts(self) -> tuple[jax.Array, ...]:
        """The arrays that the entry has."""
        return tuple(part for part in self if part is not None)

    @property
    def update(self) -> jax.Array:
        """The updates ``[B, heads * r, n, dv]`` in float32."""
        u = self.u.astype(jnp.float32)
        return u if self.step is None else u * self.step[..., None]


def read_tree(
    state: Float[Array, "B h dk dv"],
    tokens: DeltaRuleInputs,
    mask: Bool[Array, "b T T"] | None,
    before: tuple[Node, Bool[Array, "b T R"]] | None = None,
) -> tuple[jax.Array, Node]:
    """Read T tokens that see each other according to ``mask``.

    Args:
        state: S0.
        tokens: the tokens; ancestors before their descendants.
        mask: which of the tokens are on the path of each, itself included. None: each sees itself
            alone. Even tokens that nobody needs have paths, and all paths are of one forest.
        before: tokens that were read since S0, also ancestors before their descendants; and which
            of them are on the path of each of ``tokens``.

    Returns:
        The outputs, ``[B, h, T, dv]``, and the entries of the tokens.

    Examples:
        A root and two children, all with one key. Each replaces the value that the table returns
        for it.

        >>> from specjax.models.delta_rule import DeltaRuleInputs, read_tree, write
        >>> same, gate = jnp.ones((1, 1, 3, 1)), jnp.ones((1, 1, 3))
        >>> values = jnp.array([5.0, 7.0, 9.0]).reshape(1, 1, 3, 1)
        >>> tokens = DeltaRuleInputs(q=same, k=same, v=values, beta=gate, log_alpha=0 * gate)
        >>> mask = jnp.array([[[True, False, False], [True, True, False], [True, False, True]]])
        >>> empty = jnp.zeros((1, 1, 1, 1))
        >>> y, node = read_tree(empty, tokens, mask)
        >>> y.ravel().tolist(), node.u.ravel().tolist()  # children write 7 - 5 and 9 - 5
        ([5.0, 7.0, 9.0], [5.0, 2.0, 4.0])
        >>> path = jax.tree.map(lambda part: part[:, :, jnp.array([0, 2])], node)
        >>> write(empty, path).item()  # the root and its second child are accepted
        9.0
    """
    q, k, v, beta, log_alpha, step = tokens
    if log_alpha.ndim == 4:
        return _read_tree_by_rows(state, tokens, mask, before)
    entry = Node(k, v, log_alpha, step)
    q, k, v = q.astype(jnp.float32), k.astype(jnp.float32), entry.update
    count, heads = q.shape[2], q.shape[1]

    def grouped(x: jax.Array) -> jax.Array:  # [B, h, …] -> [B, heads, r, …]
        return x.reshape(x.shape[0], heads, -1, *x.shape[2:])

    v, beta = grouped(v), None if beta is None else grouped(beta)
    log_alpha = grouped(log_alpha)
    # So that the state is read once, for keys and queries.
    both, repeats = (q, 1) if beta is None else (jnp.concatenate([k, q], axis=2), 2)
    shares, log_g = (None, log_alpha) if mask is None else _shares(log_alpha, mask)
    sums = 0.0
    if before is not None:
        node, visible = before
        drafted_shares, log_g = _shares(grouped(node.log_alpha), visible, log_g)
        similar = _product("bhtk,bhik->bhti", both, node.k.astype(jnp.float32))[
            :, :, None
        ] * jnp.tile(drafted_shares, (repeats, 1))
        sums = _product("bhrti,bhriv->bhrtv", similar, grouped(node.update))
    state_values = _product("bhtk,bhrkv->bhrtv", both, grouped(state))
    sums = sums + state_values * jnp.tile(jnp.exp(log_g), repeats)[..., None]
    if beta is None:
        y, u = sums, v
    else:
        predicted, y = sums[..., :count, :], sums[..., count:, :]
        u = beta[..., None] * (v - predicted)
    if shares is None:
        y = y + jnp.sum(q * k, axis=-1)[:, :, None, :, None] * u
    else:
        similar = _product("bhtk,bhik->bhti", both, k)[:, :, None]
        if beta is not None:
            u = _solve(similar[..., :count, :] * shares * beta[..., None], u)
        y = y + _product("bhrti,bhriv->bhrtv", similar[..., -count:, :] * shares, u)
    return _joined(y), entry if beta is None else entry._replace(u=_joined(u))


def read_chain(
    state: Float[Array, "B h dk dv"], tokens: DeltaRuleInputs, count: Int[Array, " B"] | None = None
) -> tuple[jax.Array, Node, jax.Array]:
    """Read T tokens in a chain, `CHUNK` at a time; each sees all tokens before it.

    Args:
        state: S0.
        tokens: any number of tokens.
        count: the number of tokens of each row that are written into the state; None for all.

    Returns:
        The outputs and the entries, as in `read_tree`, and the state after the first ``count``
        tokens. The outputs of tokens beyond ``count`` have no meaning.
    """
    length = tokens.q.shape[2]
    if count is not None:  # tokens beyond neither decay the state nor write to it
        counts = jnp.arange(length)[None, None] < count[:, None, None]
        if tokens.beta is None:
            tokens = tokens._replace(v=jnp.where(counts[..., None], tokens.v, 0.0))
            if tokens.step is not None:
                tokens = tokens._replace(step=jnp.where(counts, tokens.step, 0.0))
        else:
            tokens = tokens._replace(beta=jnp.where(counts, tokens.beta, 0.0))
        is_of_rows = tokens.log_alpha.ndim == 4
        decays = jnp.where(counts[..., None] if is_of_rows else counts, tokens.log_alpha, 0.0)
        tokens = tokens._replace(log_alpha=decays)
    chunk = CHUNK_OF_ROWS if tokens.log_alpha.ndim == 4 else CHUNK
    size = min(length, chunk)
    mask = jnp.tril(jnp.ones((1, size, size), bool))

    # Checkpointed: in training the backward pass computes a chunk again, and stores less.
    @jax.checkpoint  # pyright: ignore[reportUntypedFunctionDecorator]
    def read(state: jax.Array, tokens: DeltaRuleInputs) -> tuple[jax.Array, tuple[jax.Array, Node]]:
        y, node = read_tree(state, tokens, mask)
        return write(state, node), (y, node)

    if length <= chunk:
        after, (y, node) = read(state, tokens)
        return y, node, after
    missing = -length % chunk

    def split(x: jax.Array) -> jax.Array:  # [B, h, T, …] -> [chunks, B, h, chunk, …]
        padded = jnp.pad(x, [(0, missing if axis == 2 else 0) for axis in range(x.ndim)])
        return jnp.moveaxis(padded.reshape(*x.shape[:2], -1, chunk, *x.shape[3:]), 2, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:])[:, :, :length]

    after, parts = jax.lax.scan(read, state, jax.tree.map(split, tokens))
    y, node = jax.tree.map(join, parts)
    return y, node, after


def read_documents(tokens: DeltaRuleInputs, documents: Int[Array, "B T"]) -> jax.Array:
    """Return the outputs ``[B, h, T, dv]`` of T tokens that each see their own document alone.

    ``documents`` has the index of each token's document. Documents are contiguous: the first token
    of a document forgets everything before it.
    """
    # A document's first token has a share of nothing, which separates it from the state before.
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))[:, None]
    begins = begins[..., None] if tokens.log_alpha.ndim == 4 else begins
    tokens = tokens._replace(log_alpha=jnp.where(begins, _FORGOTTEN, tokens.log_alpha))
    empty = jnp.zeros((*tokens.v.shape[:2], tokens.k.shape[3], tokens.v.shape[3]), jnp.float32)
    return read_chain(empty, tokens)[0]


def write(
    state: Float[Array, "B h dk dv"], path: Node, count: Int[Array, " B"] | None = None
) -> Float[Array, "B h dk dv"]:
    """Return the state after the first ``count`` tokens of a path, in order; None for all."""
    k, length = path.k.astype(jnp.float32), path.k.shape[2]
    visible = jnp.ones((1, 1, length), bool)
    if count is not None:
        visible = jnp.arange(length)[None, None] < count[:, None, None]
        # Tokens beyond `count` may be infinite or NaN, and 0 times these is NaN.
        k, u = (
            jnp.where(jnp.swapaxes(visible, 1, 2)[:, None], part, 0.0) for part in (k, path.update)
        )
    else:
        u = path.update
    if path.log_alpha.ndim == 4:
        shares, log_g = _shares_at_the_end(jnp.swapaxes(path.log_alpha, 2, 3), visible)
        updates = _product("bhnk,bhnv->bhkv", k * jnp.swapaxes(shares, 2, 3), u)
        return jnp.exp(log_g)[..., None] * state + updates
    # Each value head has alphas of its own.
    shares, log_g = _shares_at_the_end(path.log_alpha, visible)
    weighed = (u * shares[..., None]).reshape(u.shape[0], k.shape[1], -1, *u.shape[2:])
    updates = _product("bhnk,bhrnv->bhrkv", k, weighed)
    return jnp.exp(log_g[..., None, None]) * state + _joined(updates)


def _read_tree_by_rows(
    state: Float[Array, "B h dk dv"],
    tokens: DeltaRuleInputs,
    mask: Bool[Array, "b T T"] | None,
    before: tuple[Node, Bool[Array, "b T R"]] | None = None,
) -> tuple[jax.Array, Node]:
    """Do the same as `read_tree` where each row of a table decays by itself."""
    q, k, v, beta, log_alpha, _ = tokens
    assert beta is not None
    visible = jnp.eye(q.shape[2], dtype=bool)[None] if mask is None else mask
    both = jnp.concatenate([k, q], axis=2)
    similar, log_g = _similar_by_rows(both, k, log_alpha, visible)
    sums = 0.0
    if before is not None:
        node, drafted = before
        to_drafted, log_g = _similar_by_rows(both, node.k, node.log_alpha, drafted, log_g)
        sums = _product("bhti,bhiv->bhtv", to_drafted, node.u)
    remaining = jnp.exp(log_g)
    both_of_state = both * jnp.concatenate([remaining, remaining], axis=2)
    sums = sums + _product("bhtk,bhkv->bhtv", both_of_state, state)
    predicted, y = jnp.split(sums, 2, axis=2)
    between_keys, to_queries = jnp.split(similar, 2, axis=2)
    right = beta[..., None] * (v - predicted)
    u = _solve((between_keys * beta[..., None])[:, :, None], right[:, :, None])[:, :, 0]
    y = y + _product("bhti,bhiv->bhtv", to_queries, u)
    return y, Node(k, u, log_alpha)


def _similar_by_rows(
    vectors: Float[Array, "B h 2T dk"],
    keys: Float[Array, "B h n dk"],
    log_alpha: Float[Array, "B h n dk"],
    visible: Bool[Array, "b T n"],
    log_after: Float[Array, "B h T dk"] | None = None,
) -> tuple[Float[Array, "B h 2T n"], Float[Array, "B h T dk"]]:
    """Return the products of vectors and keys, weighed in each row with the share that remains.

    The shares of all rows would be an array of ``[T, n, dk]`` for each head: for a tree of 64 nodes
    and 128 rows half a million numbers. So only `PAIRS_AT_ONCE` pairs are computed at a time. The
    rows come last, because they fill the lanes of a TPU.

    Args:
        vectors: the keys of T tokens, then their queries.
        keys: the keys of n tokens.
        log_alpha: the logarithms of their alphas.
        visible: as for `_shares`.
        log_after: the logarithms of the decays after all of the n tokens.

    Returns:
        The products, and the logarithms of the shares that remain of the rows of the state.
    """
    queries, count = visible.shape[1:]
    coarse, fine = (
        jnp.swapaxes(part, 2, 3) for part in _path_sums(jnp.swapaxes(log_alpha, 2, 3), visible)
    )
    fine_ends = fine[:, :, :queries] + (0.0 if log_after is None else log_after)
    ends = (coarse[:, :, :queries], fine_ends)
    begins = (coarse[:, :, queries:], fine[:, :, queries:])

    def similar_to(token: tuple[jax.Array, ...]) -> jax.Array:
        """Return the products ``[B, h, 2, n]`` with the two vectors of a token."""
        pair, is_visible, *token_ends = token
        token_ends = [end[:, :, None] for end in token_ends]
        shares = _share_between(token_ends, begins, is_visible[:, None, :, None])
        return jnp.sum(pair[:, :, :, None] * (keys * shares)[:, :, None], axis=-1)

    pairs = vectors.reshape(*vectors.shape[:2], 2, queries, -1)
    by_token = (
        jnp.moveaxis(pairs, 3, 0),
        jnp.moveaxis(visible, 1, 0),
        *(jnp.moveaxis(end, 2, 0) for end in ends),
    )
    if queries * count <= PAIRS_AT_ONCE:
        similar = jax.vmap(similar_to)(by_token)
    else:
        similar = jax.lax.map(similar_to, by_token, batch_size=max(1, PAIRS_AT_ONCE // count))
    similar = jnp.moveaxis(similar, 0, 3).reshape(*vectors.shape[:3], count)
    return similar, ends[0] + ends[1]


def _joined(x: jax.Array) -> jax.Array:
    """Return ``[B, heads, r, …]`` as ``[B, h, …]``."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _product(sum_over: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(sum_over, a, b, precision=_EXACT)


def _shares(
    log_alpha: Float[Array, "B heads r n"],
    visible: Bool[Array, "b T n"],
    log_after: ArrayLike = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return the share that remains, at each of T tokens, of what n earlier tokens wrote.

    Args:
        log_alpha: the logarithms of the alphas of the n tokens; ancestors before their descendants.
        visible: which of the n tokens each token sees: those on its path.
        log_after: ``[B, heads, r, T]`` the logarithm of the decay after all of them.

    Returns:
        The shares ``[B, heads, r, T, n]``, 0 for tokens that are not visible; and the logarithm of
        the share that remains of the state before them, ``[B, heads, r, T]``.
    """
    queries = visible.shape[1]
    coarse, fine = _path_sums(log_alpha, visible)
    ends = (coarse[..., :queries], fine[..., :queries] + jnp.asarray(log_after))
    begins = (coarse[..., None, queries:], fine[..., None, queries:])
    shares = _share_between([end[..., None] for end in ends], begins, visible[:, None, None])
    return shares, ends[0] + ends[1]


def _share_between(
    ends: Sequence[jax.Array], begins: Sequence[jax.Array], visible: jax.Array
) -> jax.Array:
    """Return the shares between two tokens, of the two parts of their `_path_sums`."""
    coarse, fine = (end - begin for end, begin in zip(ends, begins, strict=True))
    return jnp.exp(jnp.where(visible, coarse + fine, -jnp.inf))


def _path_sums(
    log_alpha: Float[Array, "B heads r n"], visible: Bool[Array, "b T n"]
) -> tuple[Float[Array, "B heads r T+n"], Float[Array, "B heads r T+n"]]:
    """Return the sums of logarithms along paths, each in two parts.

    The first T sums are over the tokens that each of T tokens sees. The others are over the path of
    each of the n tokens, which ends with itself: all earlier tokens that some token sees together
    with it. In the tree ``a -> b, a -> c`` the path of c is a and c, because nobody sees b and c.
    The path of a token that nobody sees has no meaning.

    Returns:
        The coarse parts, which are exact multiples of 1/64, and the fine ones.
    """
    assert visible.shape[-1] <= _MOST_TOKENS, visible.shape
    sees = visible.astype(jnp.float32)
    is_on_path = jnp.tril(_product("bti,btj->bij", sees, sees) > 0).astype(jnp.float32)
    paths = jnp.concatenate([sees, is_on_path], axis=1)
    # Tokens that nobody sees may be infinite or NaN, and 0 times these is NaN.
    log_alpha = jnp.where(jnp.any(visible, axis=1)[:, None, None], log_alpha, 0.0)
    # NaN is raised, too. So it stays with its token.
    log_alpha = jnp.where(log_alpha > _LEAST_LOG, log_alpha, _LEAST_LOG)
    coarse = jnp.round(jax.lax.stop_gradient(log_alpha) * 64) / 64
    coarse, fine = (
        _product("bhrj,btj->bhrt", part, paths) for part in (coarse, log_alpha - coarse)
    )
    return coarse, fine


def _shares_at_the_end(
    log_alpha: Float[Array, "B heads n"] | Float[Array, "B heads dk n"],
    visible: Bool[Array, "b 1 n"],
) -> tuple[jax.Array, jax.Array]:
    """Return the shares that remain at the end of a chain, of any length.

    Args:
        log_alpha: the logarithms of the alphas of the tokens, in order.
        visible: which of the tokens are in the chain: the first ones.

    Returns:
        The share of each token, like ``log_alpha``, and the logarithm of the share of the state
        before them.
    """
    visible = visible if log_alpha.ndim == 3 else visible[:, None]
    in_chain = jnp.where(visible, log_alpha, 0.0)
    sums = jax.lax.cumsum(in_chain, axis=log_alpha.ndim - 1, reverse=True)
    after = jnp.concatenate([sums[..., 1:], jnp.zeros_like(sums[..., :1])], axis=-1)
    return jnp.where(visible, jnp.exp(after), 0.0), sums[..., 0]


def _solve(
    matrix: Float[Array, "B heads r T T"], right: Float[Array, "B heads r T dv"]
) -> Float[Array, "B heads r T dv"]:
    """Solve ``u + lower u = right`` for ``u``; ``lower`` is ``matrix`` below its diagonal.

    The system is inverted with matrix products. On a CPU `jax.lax.linalg.triangular_solve` is a
    library call for each head, whose threads and XLA's wait for each other: for 16 tokens it took
    0.3 to 0.7 s, and this takes 0.3 ms. On a TPU it is a program of its own between the others. The
    inverses of two neighbouring blocks A and B on the diagonal, and the block C below A, give an
    inverse of twice the size::

        (A    )^-1     (    A^-1           )
        (C   B)     =  (-B^-1 C A^-1   B^-1)
    """
    count = right.shape[-2]
    row = np.arange(count)
    distance = np.where(row[:, None] > row[None], row[:, None] ^ row[None], 0)
    # `distance` has the highest differing bit of row and column: it says in which block C both are.
    inverse, size = jnp.broadcast_to(jnp.eye(count, dtype=jnp.float32), matrix.shape), 1
    while size < count:
        # C is in the same block of 2 * size, but not in the same block of size.
        is_c = (distance >= size) & (distance < 2 * size)
        inverse = inverse - _matmul(inverse, _matmul(jnp.where(is_c, matrix, 0.0), inverse))
        size *= 2
    return _matmul(inverse, right)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=_EXACT)
