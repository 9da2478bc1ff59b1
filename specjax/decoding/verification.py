"""Which drafted tokens to keep so that the output is distributed exactly as the target's.

Works on drafts and logits; knows no drafter and no model. Symbols as in the papers: p the target's distribution, q the
drafter's, x a drafted token, gamma the length of a chain.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax import tree
from specjax.drafters.base import Draft, Verdict
from specjax.sampling import RowSampling, argmax, draw, probabilities, split_keys
from specjax.shape_checks import shape_checked

Rule = Literal["block", "rejection"]


def verify(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array, rule: Rule = "block") -> Verdict:
    """Accept a path of the draft; consumes the row keys ``[B]``.

    Args:
        draft: a tree of N nodes.
        logits: ``[B, N, V]`` the target's at every node.
        sampling: the rows' settings, warping p as they warped q.
        keys: ``[B]``.
        rule: how to accept a chain of drawn tokens: ``block`` (never fewer in expectation) or ``rejection``. Every other
            draft has one rule only: drawn siblings `recursive_rejection`, and tokens that were chosen `matching`.
    """
    if sampling.greedy:
        return matching(draft, argmax(logits))
    p = probabilities(logits, sampling)
    if draft.q is None:
        return matching(draft, _draw_everywhere(p, keys))
    if not draft.is_chain:
        return recursive_rejection(draft, p, keys)
    x, drafted = draft.tokens[:, 1:], jnp.cumprod(draft.drafted, axis=1).astype(bool)
    # With q = 0 where nothing was drafted, the rules need no special case at the end of a chain: the residual
    # max(0, p - q) is p itself there, and the bonus token falls out of it.
    q = jnp.where(jnp.pad(drafted, ((0, 0), (0, 1)))[..., None], draft.q, 0.0)
    accepted, token = CHAIN_RULES[rule](p, q, x, drafted, keys)
    path = jnp.broadcast_to(jnp.arange(draft.tokens.shape[1]), draft.tokens.shape)
    return Verdict(path=path, count=accepted + 1, token=token)


def matching(draft: Draft, target_tokens: jax.Array) -> Verdict:
    """Descend while a child is the token that the target itself puts there.

    For greedy rows that token is the argmax. For children that were chosen, not drawn, it is a draw from p: to visit them in
    order, accept x with probability p(x) and otherwise set p(x) = 0 and renormalise, comes to the same. Dividing by the
    drafter's own probability would be biased.

    Args:
        draft: a tree of N nodes.
        target_tokens: ``[B, N]`` the target's token after each node.
    """
    parents = jnp.asarray(draft.parents)
    batch, nodes = draft.tokens.shape
    wanted = jnp.take_along_axis(target_tokens, jnp.broadcast_to(parents, (batch, nodes))[:, 1:], axis=1)
    matches = jnp.pad((draft.tokens[:, 1:] == wanted) & draft.drafted, ((0, 0), (1, 0)), constant_values=True)
    reached = jnp.all(matches[:, None] | ~draft.mask, axis=-1)
    last = argmax(jnp.where(reached, draft.depths, -1))
    return _verdict(draft, last, _at(target_tokens, last))


def _draw_everywhere(p: jax.Array, keys: jax.Array) -> jax.Array:
    """``[B, N]`` a token drawn at each node of ``p [B, N, V]``, a node's the same whatever N; consumes the row keys."""
    batch, nodes, vocab = p.shape
    node_keys = jax.vmap(lambda key: jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(nodes)))(keys)
    return draw(p.reshape(batch * nodes, vocab), node_keys.reshape(-1)).reshape(batch, nodes)


def _verdict(draft: Draft, last: jax.Array, token: jax.Array) -> Verdict:
    """The verdict that accepts the path to node ``last [B]``, and ``token [B]`` after it."""
    batch, nodes = draft.tokens.shape
    paths = jnp.broadcast_to(tree.paths(draft.parents, draft.depth), (batch, nodes, draft.depth + 1))
    depth = _at(jnp.broadcast_to(draft.depths, (batch, nodes)), last)
    return Verdict(path=_at(paths, last).astype(jnp.int32), count=depth.astype(jnp.int32) + 1, token=token)


@struct.dataclass
class _Visit:
    """Where `recursive_rejection` stands.

    Attributes:
        node: ``[B]`` the last accepted node.
        candidate: ``[B]`` its child under judgement, -1 when there is none left.
        p: ``[B, V]`` what the token after ``node`` is still to be drawn from.
        q: ``[B, V]`` what the candidate was drawn from.
    """

    node: jax.Array
    candidate: jax.Array
    p: jax.Array
    q: jax.Array


@shape_checked
def recursive_rejection(draft: Draft, p: Float[Array, "B N V"], keys: Any) -> Verdict:
    """Siblings that were drawn from q without replacement: judge one after the other, and each survivor's children likewise.

    Accept x with probability min(1, p(x)/q(x)); on rejection p becomes norm(max(0, p - q)) and q loses x, renormalised.
    SpecInfer (Miao et al. 2023, arXiv 2305.09781, section 4.3), with siblings without replacement as in Sequoia (Chen et al.
    2024, arXiv 2402.12374, algorithm 2).
    """
    assert draft.q is not None
    all_q, vocab = draft.q, p.shape[-1]
    accept_keys, token_keys = split_keys(keys, 2)
    u = _uniform(accept_keys, draft.tokens.shape[1])
    valid = jnp.pad(draft.drafted, ((0, 0), (1, 0)), constant_values=True)

    def follow(order: Any) -> jax.Array:  # a node that was not drafted ends its row of siblings
        order = jnp.broadcast_to(jnp.asarray(order), draft.tokens.shape)
        return jnp.where((order >= 0) & jnp.take_along_axis(valid, jnp.maximum(order, 0), axis=1), order, -1)

    child, sibling = follow(tree.first_children(draft.parents)), follow(tree.next_siblings(draft.parents))

    def judge(visit: _Visit) -> _Visit:
        candidate = jnp.maximum(visit.candidate, 0)
        judged = visit.candidate >= 0
        x = _at(draft.tokens, candidate)
        # u < p/q without the division. A greedy row's q is 0 from its second sibling on: p(x) > 0 accepts it.
        accept = judged & (_at(u, candidate) * _at(visit.q, x) < _at(visit.p, x))
        reject = judged & ~accept
        residual = jnp.maximum(0.0, visit.p - visit.q)
        rest = jnp.where(jnp.arange(vocab)[None] == x[:, None], 0.0, visit.q)
        node = jnp.where(accept, candidate, visit.node)

        def advance(accepted: jax.Array, rejected: jax.Array, neither: jax.Array) -> jax.Array:
            return jnp.where(_like(accept, neither), accepted, jnp.where(_like(reject, neither), rejected, neither))

        return _Visit(
            node=node,
            candidate=advance(_at(child, candidate), _at(sibling, candidate), visit.candidate),
            p=advance(_at(p, node), _normalised(residual, otherwise=visit.p), visit.p),
            q=advance(_at(all_q, node), _normalised(rest, otherwise=rest), visit.q),
        )

    start = _Visit(node=jnp.zeros_like(child[:, 0]), candidate=child[:, 0], p=p[:, 0], q=all_q[:, 0])
    end = jax.lax.while_loop(lambda visit: jnp.any(visit.candidate >= 0), judge, start)
    return _verdict(draft, end.node, draw(end.p, token_keys))


def _normalised(mass: jax.Array, otherwise: jax.Array) -> jax.Array:
    """``mass [B, V]`` divided by its sum; ``otherwise`` where that is 0."""
    total = jnp.sum(mass, axis=-1, keepdims=True)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), otherwise)


def _like(condition: jax.Array, values: jax.Array) -> jax.Array:
    """``condition [B]`` with the trailing axes of ``values``."""
    return condition.reshape(-1, *(1,) * (values.ndim - 1))


@shape_checked
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


@shape_checked
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
