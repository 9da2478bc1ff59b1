"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464), over chains and over trees of tokens.

A head keeps a state ``S [dk, dv]``: a table that a key looks a value up in. A token forgets a share of it, and then writes the
part of its value that the table did not say already::

    S' = alpha S + k u^T        u = beta (v - alpha S^T k)        y = S'^T q

with the key k (of length 1), the value v, the query q, and two gates from 0 to 1: alpha, what is kept of the state, and beta,
how much is written. ``u`` is the *update* of the token.

Token by token that is a loop. Several tokens at once are read as follows, where the state S0 is that before all of them. They
may be a chain or a tree; ``anc(n)`` are the ancestors of n, and g_n is the product of the alphas from S0 to n along its path::

    u_n + beta_n sum_a (g_n / g_a) (k_a . k_n) u_a  =  beta_n (v_n - g_n S0^T k_n)              a in anc(n)
    y_n  =  g_n S0^T q_n + sum_a (g_n / g_a) (k_a . q_n) u_a                                    a in anc(n) and n

Ancestors stand before their descendants, so that the first line is a system of equations with a triangular matrix. The state
is read once, whatever the number of tokens, and never written: what has to be remembered of a token is k, u and alpha, which is
a hundredth of a state. Of the path that is accepted they are then written into the state::

    S  =  g_m S0 + sum_a (g_m / g_a) k_a u_a^T                                                  m its end, a in anc(m) and m

All of it is float32. The logarithm of a share g_n / g_a is the sum of those of the alphas between the two. As the difference of
two longer sums it would lose digits: where a head forgets all at some tokens, and hardly anything at others, the sums grow to
thousands, and a small difference of two of them is known to a ten-thousandth.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64
"""Tokens of a chain that are read at once: the system of equations grows with their square."""

_FORGOTTEN = -1e9
"""The logarithm of a share that is nothing: its power is 0."""

_EXACT = jax.lax.Precision.HIGHEST
"""Of products: "float32" on an accelerator is less by default."""


class DeltaRuleInputs(NamedTuple):
    """What the rule is given of T tokens, all in float32. There are r value heads to each of the heads of keys.

    Attributes:
        q: ``[B, heads, T, dk]`` queries, scaled.
        k: ``[B, heads, T, dk]`` keys, of length 1.
        v: ``[B, heads * r, T, dv]`` values.
        beta: ``[B, heads * r, T]`` how much each writes.
        log_alpha: ``[B, heads * r, T]`` the logarithm of what each keeps of the state.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    log_alpha: jax.Array


class Node(NamedTuple):
    """What is remembered of tokens that were read and are not in the state.

    Attributes:
        k: ``[B, heads, n, dk]`` as in `DeltaRuleInputs`.
        u: ``[B, heads * r, n, dv]`` their updates.
        log_alpha: ``[B, heads * r, n]`` as in `DeltaRuleInputs`.
    """

    k: jax.Array
    u: jax.Array
    log_alpha: jax.Array


def read_tree(
    state: Float[Array, "B h dk dv"],
    tokens: DeltaRuleInputs,
    mask: Bool[Array, "b T T"] | None,
    before: tuple[Node, Bool[Array, "b T R"]] | None = None,
) -> tuple[jax.Array, Node]:
    """Read T tokens that see each other as ``mask`` says.

    Args:
        state: S0.
        tokens: ancestors before their descendants.
        mask: which of the tokens each of them has on its path, itself among them. None: itself alone.
        before: tokens that were read since S0, ancestors before their descendants too; and which of them each of ``tokens`` has
            on its path.

    Returns:
        What each comes to, ``[B, h, T, dv]``; and what is to be remembered of them.

    Examples:
        A root and two children, all with one key. Each replaces what the table says of it.

        >>> from specjax.models.delta_rule import DeltaRuleInputs, read_tree, write
        >>> same, gate = jnp.ones((1, 1, 3, 1)), jnp.ones((1, 1, 3))
        >>> values = jnp.array([5.0, 7.0, 9.0]).reshape(1, 1, 3, 1)
        >>> tokens = DeltaRuleInputs(q=same, k=same, v=values, beta=gate, log_alpha=0 * gate)
        >>> mask = jnp.array([[[True, False, False], [True, True, False], [True, False, True]]])
        >>> empty = jnp.zeros((1, 1, 1, 1))
        >>> y, node = read_tree(empty, tokens, mask)
        >>> y.ravel().tolist(), node.u.ravel().tolist()  # the children do not see each other: 7 - 5, 9 - 5
        ([5.0, 7.0, 9.0], [5.0, 2.0, 4.0])
        >>> path = jax.tree.map(lambda part: part[:, :, jnp.array([0, 2])], node)
        >>> write(empty, path).item()  # the root and its second child are accepted
        9.0
    """
    q, k, v, beta, log_alpha = tokens
    count, heads = q.shape[2], q.shape[1]

    def grouped(x: jax.Array) -> jax.Array:  # [B, h, …] -> [B, heads, r, …]
        return x.reshape(x.shape[0], heads, -1, *x.shape[2:])

    v, beta, log_alpha = grouped(v), grouped(beta), grouped(log_alpha)
    both = jnp.concatenate([k, q], axis=2)  # one reading of the state serves keys and queries
    shares, log_g = (None, log_alpha) if mask is None else _shares(log_alpha, mask)
    found = 0.0
    if before is not None:
        node, visible = before
        of_drafted, log_g = _shares(grouped(node.log_alpha), visible, log_g)
        similar = _product("bhtk,bhik->bhti", both, node.k)[:, :, None] * jnp.tile(of_drafted, (2, 1))
        found = _product("bhrti,bhriv->bhrtv", similar, grouped(node.u))
    of_state = _product("bhtk,bhrkv->bhrtv", both, grouped(state))
    found = found + of_state * jnp.tile(jnp.exp(log_g), 2)[..., None]
    known, y = found[..., :count, :], found[..., count:, :]
    u = beta[..., None] * (v - known)
    if shares is None:
        y = y + jnp.sum(q * k, axis=-1)[:, :, None, :, None] * u
    else:
        similar = _product("bhtk,bhik->bhti", both, k)[:, :, None]
        u = _solve(similar[..., :count, :] * shares * beta[..., None], u)
        y = y + _product("bhrti,bhriv->bhrtv", similar[..., count:, :] * shares, u)
    return _joined(y), Node(k, _joined(u), tokens.log_alpha)


def read_chain(
    state: Float[Array, "B h dk dv"], tokens: DeltaRuleInputs, count: Int[Array, " B"] | None = None
) -> tuple[jax.Array, Node, jax.Array]:
    """Read T tokens each of which has all others before it on its path, `CHUNK` at a time.

    Args:
        state: S0.
        tokens: of which there may be any number.
        count: how many of each row are written into the state; None: all.

    Returns:
        What each comes to, and what is to be remembered of them, as `read_tree`; and the state after the first ``count``. Of
        the tokens beyond ``count`` the rest has no meaning.
    """
    length = tokens.q.shape[2]
    if count is not None:  # what lies beyond neither forgets nor writes
        counts = jnp.arange(length)[None, None] < count[:, None, None]
        tokens = tokens._replace(beta=jnp.where(counts, tokens.beta, 0.0), log_alpha=jnp.where(counts, tokens.log_alpha, 0.0))
    size = min(length, CHUNK)
    mask = jnp.tril(jnp.ones((1, size, size), bool))

    @jax.checkpoint  # pyright: ignore[reportUntypedFunctionDecorator]  # in training a chunk is read again instead of kept
    def read(state: jax.Array, tokens: DeltaRuleInputs) -> tuple[jax.Array, tuple[jax.Array, Node]]:
        y, node = read_tree(state, tokens, mask)
        return write(state, node), (y, node)

    if length <= CHUNK:
        after, (y, node) = read(state, tokens)
        return y, node, after
    missing = -length % CHUNK

    def split(x: jax.Array) -> jax.Array:  # [B, h, T, …] -> [chunks, B, h, CHUNK, …]
        padded = jnp.pad(x, [(0, missing if axis == 2 else 0) for axis in range(x.ndim)])
        return jnp.moveaxis(padded.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:]), 2, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:])[:, :, :length]

    after, parts = jax.lax.scan(read, state, jax.tree.map(split, tokens))
    y, node = jax.tree.map(join, parts)
    return y, node, after


def read_documents(tokens: DeltaRuleInputs, documents: Int[Array, "B T"]) -> jax.Array:
    """``[B, h, T, dv]`` what T tokens come to each of which has those before it of its own document on its path.

    ``documents`` has their numbers, and they lie end to end: a document's first token forgets all that was before.
    """
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))[:, None]
    tokens = tokens._replace(log_alpha=jnp.where(begins, _FORGOTTEN, tokens.log_alpha))
    empty = jnp.zeros((*tokens.v.shape[:2], tokens.k.shape[3], tokens.v.shape[3]), jnp.float32)
    return read_chain(empty, tokens)[0]


def write(state: Float[Array, "B h dk dv"], path: Node, count: Int[Array, " B"] | None = None) -> Float[Array, "B h dk dv"]:
    """The state after the first ``count`` tokens of a ``path`` below it, in order; None: all."""
    length, (k, u, log_alpha) = path.k.shape[2], path
    visible = jnp.ones((1, 1, length), bool)
    if count is not None:
        visible = jnp.arange(length)[None, None] < count[:, None, None]
        # What does not count may be of any size, and must not come in as 0 times that.
        k, u = (jnp.where(jnp.swapaxes(visible, 1, 2)[:, None], part, 0.0) for part in (k, u))
    # As one token at the end of the path sees it, of one value head to each of the heads that are counted here.
    shares, log_g = _shares(log_alpha[:, :, None], visible)
    weighed = (u * shares[:, :, 0, 0, :, None]).reshape(u.shape[0], k.shape[1], -1, *u.shape[2:])
    written = _product("bhnk,bhrnv->bhrkv", k, weighed)
    return jnp.exp(log_g[:, :, 0, 0, None, None]) * state + _joined(written)


def _joined(x: jax.Array) -> jax.Array:
    """``[B, heads, r, …]`` as ``[B, h, …]``."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _product(sum_over: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(sum_over, left, right, precision=_EXACT)


def _shares(
    log_alpha: Float[Array, "B heads r n"], visible: Bool[Array, "b T n"], log_own: ArrayLike = 0.0
) -> tuple[jax.Array, jax.Array]:
    """What is left at each of T tokens of what n others wrote, of which it sees some.

    Args:
        log_alpha: of the n, ancestors before their descendants.
        visible: which of them each token sees: those on its path.
        log_own: ``[B, heads, r, T]`` what is forgotten behind all of them.

    Returns:
        The shares ``[B, heads, r, T, n]``, 0 of those that are not seen; and the logarithm of what is left of the state before
        them, ``[B, heads, r, T]``.
    """
    count = log_alpha.shape[-1]
    seen = jnp.where(visible[:, None, None], log_alpha[..., None, :], 0.0)
    if count <= CHUNK:  # a product with few rows is faster than a running sum
        behind = _product("bhrtj,ji->bhrti", seen, jnp.tril(jnp.ones((count, count), jnp.float32), -1))
    else:
        behind = jnp.pad(jax.lax.cumsum(seen, axis=4, reverse=True)[..., 1:], ((0, 0),) * 4 + ((0, 1),))
    log_own = jnp.asarray(log_own)
    shares = jnp.exp(jnp.where(visible[:, None, None], behind + log_own[..., None], -jnp.inf))
    return shares, jnp.sum(seen, axis=-1) + log_own


def _solve(matrix: Float[Array, "B heads r T T"], right: Float[Array, "B heads r T dv"]) -> Float[Array, "B heads r T dv"]:
    """``u`` with ``u + lower u = right``, where ``lower`` is what lies below the diagonal of ``matrix``.

    It is inverted by products. `jax.lax.linalg.triangular_solve` is a call of a library's for each head on a CPU, whose threads
    and XLA's wait for each other: for 16 tokens it took 0.3 to 0.7 s where this takes 0.3 ms. On a TPU it is a program of its
    own between the others. The inverse of two neighbouring blocks A and B on the diagonal, and of what stands below A, makes
    one of twice the size::

        (A    )^-1     (    A^-1           )
        (C   B)     =  (-B^-1 C A^-1   B^-1)
    """
    count = right.shape[-2]
    index = np.arange(count)
    apart = np.where(index[:, None] > index[None], index[:, None] ^ index[None], 0)
    inverse, size = jnp.broadcast_to(jnp.eye(count, dtype=jnp.float32), matrix.shape), 1
    while size < count:
        is_c = (apart >= size) & (apart < 2 * size)  # in one block of twice the size, and not in one of the size
        inverse = inverse - _matmul(inverse, _matmul(jnp.where(is_c, matrix, 0.0), inverse))
        size *= 2
    return _matmul(inverse, right)


def _matmul(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision=_EXACT)
