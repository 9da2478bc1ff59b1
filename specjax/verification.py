"""Which drafted tokens to keep so that the output is distributed exactly as the target's.

Works on drafts and logits; knows no drafter and no model. Symbols as in the papers: p the target's distribution, q the
drafter's, x a drafted token, gamma the length of a chain.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.base import Draft, Verdict
from specjax.sampling import RowSampling, argmax, draw, probabilities, split_keys
from specjax.typed import typed

Rule = Literal["block", "rejection"]


def verify(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array, rule: Rule = "block") -> Verdict:
    """Accept a path of the draft; consumes the row keys ``[B]``.

    Args:
        draft: a chain of N nodes.
        logits: ``[B, N, V]`` the target's at every node.
        sampling: the rows' settings, warping p as they warped q.
        keys: ``[B]``.
        rule: how to accept drawn tokens: ``block`` (never fewer in expectation) or ``rejection``. Tokens that were
            chosen, not drawn, have one rule only, in which both coincide.

    Raises:
        NotImplementedError: the draft is not a chain.
    """
    if not draft.is_chain:
        raise NotImplementedError("only chains can be verified")
    x, drafted = draft.tokens[:, 1:], jnp.cumprod(draft.drafted, axis=1).astype(bool)
    if sampling.greedy:
        accepted, token = _greedy(argmax(logits), x, drafted)
    else:
        p = probabilities(logits, sampling)
        if draft.q is None:
            accepted, token = chosen(p, x, drafted, keys)
        else:
            # With q = 0 where nothing was drafted, the rules need no special case at the end of a chain: the
            # residual max(0, p - q) is p itself there, and the bonus token falls out of it.
            has_child = jnp.pad(drafted, ((0, 0), (0, 1)))
            q = jnp.where(has_child[..., None], draft.q, 0.0)
            accepted, token = CHAIN_RULES[rule](p, q, x, drafted, keys)
    path = jnp.broadcast_to(jnp.arange(draft.tokens.shape[1]), draft.tokens.shape)
    return Verdict(path=path, count=accepted + 1, token=token)


def _greedy(best: jax.Array, x: jax.Array, drafted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accept while the argmax ``best [B, N]`` is the drafted token; add the argmax after that."""
    accepted = _leading((best[:, :-1] == x) & drafted)
    return accepted, _at(best, accepted)


@typed
def chosen(
    p: Float[Array, "B N V"], x: Int[Array, "B gamma"], drafted: Any, keys: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Tokens that were chosen, not drawn: accept x with probability p(x), else draw from p without x.

    This is `rejection` with a one-hot q. Dividing by the drafter's own probability here would be biased.

    Returns:
        ``([B] accepted tokens, [B] the token after them)``.
    """
    accept_keys, token_keys = split_keys(keys, 2)
    accepted = _leading((_uniform(accept_keys, x.shape[1]) < _of(p, x)) & drafted)
    refused = _at(jnp.pad(x, ((0, 0), (0, 1))), accepted)
    was_refused = _at(jnp.pad(drafted, ((0, 0), (0, 1))), accepted)
    without = was_refused[:, None] & (jnp.arange(p.shape[-1])[None] == refused[:, None])
    return accepted, draw(jnp.where(without, 0.0, _at(p, accepted)), token_keys)


@typed
def rejection(
    p: Float[Array, "B N V"], q: Float[Array, "B N V"], x: Int[Array, "B gamma"], drafted: Any, keys: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Speculative sampling: accept x with probability min(1, p(x)/q(x)), else draw from norm(max(0, p - q)).

    Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1; q is 0 at nodes without a child.

    Returns:
        ``([B] accepted tokens, [B] the token after them)``.
    """
    accept_keys, token_keys = split_keys(keys, 2)
    u = _uniform(accept_keys, x.shape[1])
    # u < p/q without the division. q(x) > 0, for x was drawn from q.
    accepted = _leading((u * _of(q, x) < _of(p, x)) & drafted)
    return accepted, _draw_residual(jnp.ones_like(accepted, jnp.float32), _at(p, accepted), _at(q, accepted), token_keys)


@typed
def block(
    p: Float[Array, "B N V"], q: Float[Array, "B N V"], x: Int[Array, "B gamma"], drafted: Any, keys: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Block verification: accept the longest prefix that passes, judged jointly.

    Sun et al. 2024, arXiv 2403.10444, Algorithm 2; q is 0 at nodes without a child, which makes h equal its own value at
    the end of the chain, p_gamma.

    Returns:
        ``([B] accepted tokens, [B] the token after them)``.
    """
    accept_keys, token_keys = split_keys(keys, 2)

    def joint_ratio(ratio: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        p_x, q_x = pair  # p_i = min(1, p_{i-1} * p(x_i) / q(x_i)), equation (4)
        ratio = jnp.minimum(1.0, ratio * p_x / jnp.where(q_x > 0, q_x, 1.0))
        return ratio, ratio

    first = jnp.ones(x.shape[0], jnp.float32)
    _, ratios = jax.lax.scan(joint_ratio, first, (_of(p, x).T, _of(q, x).T))
    ratios = jnp.concatenate([first[None], ratios]).T  # [B, N]
    excess = jnp.sum(jnp.maximum(0.0, ratios[..., None] * p - q), axis=-1)
    below = excess + (1.0 - ratios)
    h = jnp.where(below > 0, excess / jnp.where(below > 0, below, 1.0), 0.0)  # equation (5)
    passes = (_uniform(accept_keys, x.shape[1]) < h[:, 1:]) & drafted
    accepted = jnp.max(jnp.where(passes, jnp.arange(1, x.shape[1] + 1), 0), axis=1, initial=0)
    return accepted, _draw_residual(_at(ratios, accepted), _at(p, accepted), _at(q, accepted), token_keys)


CHAIN_RULES: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {"block": block, "rejection": rejection}
"""The rules for chains whose tokens were drawn."""


def _draw_residual(ratio: jax.Array, p: jax.Array, q: jax.Array, keys: jax.Array) -> jax.Array:
    """A token from norm(max(0, ratio * p - q)), each ``[B, V]``; consumes ``keys``."""
    residual = jnp.maximum(0.0, ratio[:, None] * p - q)
    # Where p and q agree to the last bit a rejection has probability 0, but rounding may still call for a token.
    return draw(jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, p), keys)


def _leading(passed: jax.Array) -> jax.Array:
    """``[B]`` how many of ``passed [B, gamma]`` hold before the first that does not."""
    return jnp.sum(jnp.cumprod(passed.astype(jnp.int32), axis=1), axis=1)


def _at(values: jax.Array, node: jax.Array) -> jax.Array:
    """``values [B, N, …]`` at each row's ``node [B]``."""
    return values[jnp.arange(values.shape[0]), node]


def _of(values: jax.Array, x: jax.Array) -> jax.Array:
    """``[B, gamma]`` of ``values [B, N, V]``: node i's value of the token drafted below it."""
    return jnp.take_along_axis(values[:, :-1], x[..., None], axis=-1)[..., 0]


def _uniform(keys: jax.Array, count: int) -> jax.Array:
    """``[B, count]`` in [0, 1), the first of them the same for every ``count``; consumes the row keys."""

    def row(key: jax.Array) -> jax.Array:
        return jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(jnp.arange(count))

    return jax.vmap(row)(keys)
