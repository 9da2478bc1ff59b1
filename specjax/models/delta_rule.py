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
is read once, whatever the number of tokens, and never written: what has to be remembered of a token is k, u and g, which is
a hundredth of a state. Of the path that is accepted they are then written into the state::

    S  =  g_m S0 + sum_a (g_m / g_a) k_a u_a^T                                                  m its end, a in anc(m) and m

All of it is float32, and g is kept as its logarithm: of long texts it is too small a number.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CHUNK = 64
"""Tokens of a chain that are read at once: the system of equations grows with their square."""

_EXACT = jax.lax.Precision.HIGHEST
"""Of products: "float32" on an accelerator is less by default."""


class Tokens(NamedTuple):
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
        k: ``[B, heads, n, dk]`` as in `Tokens`.
        u: ``[B, heads * r, n, dv]`` their updates.
        log_g: ``[B, heads * r, n]`` the logarithm of what is left of the state at each, its own alpha among what was lost.
    """

    k: jax.Array
    u: jax.Array
    log_g: jax.Array


def read_tree(
    state: Float[Array, "B h dk dv"],
    tokens: Tokens,
    mask: Bool[Array, "b T T"] | None,
    before: tuple[Node, Bool[Array, "b T R"]] | None = None,
) -> tuple[jax.Array, Node]:
    """Read T tokens that see each other as ``mask`` says.

    Args:
        state: S0.
        tokens: those before which they stand come first.
        mask: which of the tokens each of them has on its path, itself among them. None: itself alone.
        before: tokens that were read since S0, and which of them each has on its path.

    Returns:
        What each comes to, ``[B, h, T, dv]``; and what is to be remembered of them.
    """
    q, k, v, beta, log_alpha = tokens
    count, heads = q.shape[2], q.shape[1]

    def grouped(x: jax.Array) -> jax.Array:  # [B, h, …] -> [B, heads, r, …]
        return x.reshape(x.shape[0], heads, -1, *x.shape[2:])

    v, beta, log_alpha = grouped(v), grouped(beta), grouped(log_alpha)
    both = jnp.concatenate([k, q], axis=2)  # one reading of the state serves keys and queries
    log_g = log_alpha if mask is None else _product("bti,bhri->bhrt", mask.astype(jnp.float32), log_alpha)
    if before is not None:
        # What is left of the state only shrinks along a path: at its newest token it is least.
        newest = jnp.where(before[1][:, None, None], grouped(before[0].log_g)[:, :, :, None], 0.0)
        log_g = log_g + jnp.min(newest, axis=-1)
    found = _product("bhtk,bhrkv->bhrtv", both, grouped(state))
    found = found * jnp.tile(jnp.exp(log_g), 2)[..., None]
    if before is not None:
        node, visible = before
        decays = _decays(log_g, grouped(node.log_g), visible)
        similar = _product("bhtk,bhik->bhti", both, node.k)[:, :, None] * jnp.tile(decays, (2, 1))
        found = found + _product("bhrti,bhriv->bhrtv", similar, grouped(node.u))
    known, y = found[..., :count, :], found[..., count:, :]
    u = beta[..., None] * (v - known)
    if mask is None or count == 1:
        y = y + jnp.sum(q * k, axis=-1)[:, :, None, :, None] * u
    else:
        decays = _decays(log_g, log_g, mask)
        similar = _product("bhtk,bhik->bhti", both, k)[:, :, None]
        u = _solve(similar[..., :count, :] * decays * beta[..., None], u)
        y = y + _product("bhrti,bhriv->bhrtv", similar[..., count:, :] * decays, u)
    return _joined(y), Node(k, _joined(u), _joined(log_g))


def read_chain(
    state: Float[Array, "B h dk dv"], tokens: Tokens, count: Int[Array, " B"] | None = None
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

    def read(carry: tuple[jax.Array, jax.Array], tokens: Tokens) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, Node]]:
        state, log_before = carry
        y, node = read_tree(state, tokens, mask)
        after = write(state, node)
        node = node._replace(log_g=node.log_g + log_before[..., None])
        return (after, node.log_g[..., -1]), (y, node)

    start = state, jnp.zeros(state.shape[:2], jnp.float32)
    if length <= CHUNK:
        (after, _), (y, node) = read(start, tokens)
        return y, node, after
    missing = -length % CHUNK

    def split(x: jax.Array) -> jax.Array:  # [B, h, T, …] -> [chunks, B, h, CHUNK, …]
        padded = jnp.pad(x, [(0, missing if axis == 2 else 0) for axis in range(x.ndim)])
        return jnp.moveaxis(padded.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:]), 2, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:])[:, :, :length]

    (after, _), parts = jax.lax.scan(read, start, jax.tree.map(split, tokens))
    y, node = jax.tree.map(join, parts)
    return y, node, after


def write(state: Float[Array, "B h dk dv"], path: Node, count: Int[Array, " B"] | None = None) -> Float[Array, "B h dk dv"]:
    """The state after the first ``count`` tokens of a ``path`` below it, in order; None: all."""
    heads, length = path.k.shape[1:3]
    log_g = path.log_g.reshape(path.log_g.shape[0], heads, -1, length)
    if count is None:
        counts, log_end = True, log_g[..., -1]
    else:
        counts = (jnp.arange(length)[None] < count[:, None])[:, None, None]
        log_end = jnp.min(jnp.where(counts, log_g, 0.0), axis=-1)  # at the newest it is least
    weights = jnp.exp(jnp.where(counts, log_end[..., None] - log_g, -jnp.inf))
    # What does not count may be of any size, and must not come in as 0 times that.
    u = jnp.where(weights[..., None] > 0, path.u.reshape(*log_g.shape, -1) * weights[..., None], 0.0)
    written = _product("bhnk,bhrnv->bhrkv", path.k, u)
    return jnp.exp(_joined(log_end))[..., None, None] * state + _joined(written)


def _joined(x: jax.Array) -> jax.Array:
    """``[B, heads, r, …]`` as ``[B, h, …]``."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _product(sum_over: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(sum_over, left, right, precision=_EXACT)


def _decays(at: jax.Array, since: jax.Array, visible: jax.Array) -> jax.Array:
    """``[B, heads, r, T, n]`` what is left, at each of T tokens, of what each of n others wrote; 0 of those it does not see."""
    return jnp.exp(jnp.where(visible[:, None, None], at[..., :, None] - since[..., None, :], -jnp.inf))


def _solve(matrix: Float[Array, "B heads r T T"], right: Float[Array, "B heads r T dv"]) -> Float[Array, "B heads r T dv"]:
    """``u`` with ``u + lower u = right``, where ``lower`` is what lies below the diagonal of ``matrix``."""
    return jax.lax.linalg.triangular_solve(matrix, right, left_side=True, lower=True, unit_diagonal=True)
