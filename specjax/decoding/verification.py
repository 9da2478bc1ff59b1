"""Which drafted tokens to keep so that the output is distributed exactly as the target's.

Works on drafts and logits; knows no drafter and no model. Symbols as in the papers: p the target's distribution, q the
drafter's, x a drafted token, gamma the length of a chain.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.drafts import tree
from specjax.drafts.draft import Draft, Verdict
from specjax.sampling import (
    Distributions,
    RowSampling,
    Rule,
    argmax,
    at_nodes,
    can_be_drawn,
    distributions,
    draw,
    noise_of_rows,
    perturbed,
    probabilities,
    split_keys,
    without_stop_tokens,
)
from specjax.shape_checks import shape_checked

NodeRule = Callable[[Draft, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""``(draft, node [B], p [B, V], keys [B]) -> (child [B], token [B])``, p being the target's distribution after the node: which
of its children is accepted, or -1 and the token that comes instead. Consumes the keys."""


ChainRule = Callable[..., tuple[jax.Array, jax.Array]]
"""``(p, q [B, N, V], x [B, gamma], drafted [B, gamma], keys [B]) -> (accepted [B], token [B])``, of a chain that was drawn."""


def verify(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    """Accept a path of the draft, by the rule of `RULES` that ``sampling.rule`` names; consumes the keys.

    Where all rows are greedy, every rule comes to `follow_argmax`.

    A node ends its path where no token can be drawn from its logits (`specjax.sampling.can_be_drawn`), as if nothing had been
    drafted below it. A row whose path ends there draws no token: `Verdict.bad`. Whether a row comes there, and by which tokens,
    is decided as the target alone would. A token whose own q is NaN was drawn from nothing, and counts as not drafted.

    Args:
        draft: a tree of N nodes.
        logits: ``[B, N, V]`` the target's at every node.
        sampling: the rows' settings, warping p as they warped q.
        keys: ``[B]``; of a rule with keys by position, ``[D + 1, B]`` those of the positions below nodes of each depth.
    """
    if sampling.greedy:
        allowed = without_stop_tokens(logits, sampling, draft.depths)
        return follow_argmax(draft, argmax(allowed), can_be_drawn(allowed))
    return RULES[sampling.rule].verify(draft, logits, sampling, keys)


def independent(
    draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array, judge_chain: ChainRule | None = None
) -> Verdict:
    """Verify with random numbers that the drafter does not know, by what the draft says of itself.

    Chosen tokens are verified by `matching`, drawn siblings by `recursive_rejection`, and a chain of drawn tokens by
    ``judge_chain``; None is `block`. Arguments as for `verify`, with keys ``[B]``.
    """
    if draft.q is None:
        return descend(draft, by_rule(matching, logits, sampling, keys))
    if not draft.is_chain:
        return descend(draft, by_rule(recursive_rejection, logits, sampling, keys))
    of_chain = without_stop_tokens(logits, sampling, draft.depths)
    p, good, x = distributions(of_chain, sampling), can_be_drawn(of_chain), draft.tokens[:, 1:]
    # A drafter's q is NaN for all tokens or for none. What depends on q(x) being a number does not depend on x.
    drafted = draft.drafted & good[:, :-1] & ~jnp.isnan(_of(draft.q, x))
    drafted = jnp.cumprod(drafted, axis=1).astype(bool)
    # The rules need no special case for a node without logits: it is the end of a chain, and any distribution may stand there.
    p = replace(p, best=jnp.where(good, p.best, 0), is_certain=p.is_certain | ~good)
    accepted, token = (judge_chain or block)(p, draft.q, x, drafted, keys)
    path = jnp.broadcast_to(jnp.arange(draft.tokens.shape[1], dtype=jnp.int32), draft.tokens.shape)
    return Verdict(path=path, count=accepted + 1, token=token, bad=~at_nodes(good, accepted))


def follow_argmax(draft: Draft, best: jax.Array, good: jax.Array) -> Verdict:
    """Descend while a child is the target's likeliest token: all rows are greedy, and no distribution is formed.

    Args:
        draft: a tree of N nodes.
        best: ``[B, N]`` the target's likeliest token after each node.
        good: ``[B, N]`` bool, whether there is one.
    """
    batch, nodes = draft.tokens.shape
    parents = jnp.broadcast_to(jnp.asarray(draft.parents), (batch, nodes))
    choices, is_choice = (jnp.take_along_axis(each, parents[:, 1:], axis=1) for each in (best, good))
    matches = (draft.tokens[:, 1:] == choices) & is_choice & draft.drafted
    matches = jnp.pad(matches, ((0, 0), (1, 0)), constant_values=True)
    reached = jnp.all(matches[:, None] | ~draft.mask, axis=-1)
    last = argmax(jnp.where(reached, draft.depths, -1))
    paths = jnp.broadcast_to(tree.paths(draft.parents, draft.depth), (batch, nodes, draft.depth + 1))
    depth = at_nodes(jnp.broadcast_to(draft.depths, (batch, nodes)), last)
    return Verdict(
        path=at_nodes(paths, last).astype(jnp.int32),
        count=depth.astype(jnp.int32) + 1,
        token=at_nodes(best, last),
        bad=~at_nodes(good, last),
    )


def coupled(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    """Go where a child is the token that the target draws, with random numbers that belong to the position of that token.

    At every node the target draws ``y = argmax(log p + G)``, G being the Gumbel numbers of the position below. That is an
    exact draw, and what is emitted is y whatever was drafted: the text depends on the row's key and on the target alone.
    Drafts are accepted more often than by `matching` because the drafter knows G, too, and offers what is likely given G.

    Drafter-invariant decoding (Daliri et al. 2024, arXiv 2408.07978); for trees as in exponential races (arXiv 2504.15475).

    Args:
        draft: a tree of N nodes, made with the same keys, or without any.
        logits: ``[B, N, V]`` the target's at every node.
        sampling: the rows' settings. Greedy rows have no G.
        keys: ``[D + 1, B]``, from `position_keys`.
    """

    def visit(draft: Draft, node: jax.Array, depth: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        noise = noise_of_rows(keys[depth], logits.shape[-1], sampling)
        allowed = without_stop_tokens(at_nodes(logits, node), sampling, depth)
        return *_holding(draft, node, argmax(perturbed(allowed, sampling, noise))), can_be_drawn(allowed)

    return descend(draft, visit)


@struct.dataclass
class _Descent:
    """How far `descend` has come.

    Attributes:
        depth: scalar, of the nodes that are visited next.
        going: ``[B]`` bool, the rows that visit one.
        verdict: so far; its token is meaningful where a row has stopped.
    """

    depth: jax.Array
    going: jax.Array
    verdict: Verdict


Visit = Callable[[Draft, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
"""``(draft, node [B], depth) -> (child [B], token [B], good [B])``: which child of the node, of that depth, is accepted, or -1
and the token that comes instead; and whether a token can be drawn there at all."""


def descend(draft: Draft, visit: Visit) -> Verdict:
    """Walk down from the root: at each node let ``visit`` go on to a child or end with a token.

    So p is formed where a row arrives, at most D + 1 times, and not at all N nodes: for 60 nodes and 128,000 tokens those are
    31 MB a row, and to truncate p (top-k, top-p) passes over it 64 times. The walk ends with its last row.

    Args:
        draft: a tree of N nodes.
        visit: where to go from a node. Rows that have stopped are offered no child.
    """

    def go(descent: _Descent) -> _Descent:
        depth, going, so_far = descent.depth, descent.going, descent.verdict
        below = replace(draft, valid=_drafted(draft) & going[:, None])
        child, token, good = visit(below, so_far.path[:, depth], depth)
        assert so_far.bad is not None
        accepted = (child >= 0) & good
        path = so_far.path.at[:, depth + 1].set(jnp.maximum(child, 0), mode="drop")
        verdict = Verdict(
            path=path,
            count=so_far.count + accepted,
            token=jnp.where(going, token, so_far.token),
            bad=so_far.bad | (going & ~good),
        )
        return _Descent(depth=depth + 1, going=accepted, verdict=verdict)

    batch = draft.tokens.shape[0]
    root = Verdict(
        path=jnp.zeros((batch, draft.depth + 1), jnp.int32),
        count=jnp.ones(batch, jnp.int32),
        token=jnp.zeros(batch, jnp.int32),
        bad=jnp.zeros(batch, bool),
    )
    start = _Descent(depth=jnp.zeros((), jnp.int32), going=jnp.ones(batch, bool), verdict=root)
    if draft.depth == 0:  # plain decoding: one visit, and no loop for a device to ask its host about
        return go(start).verdict
    return jax.lax.while_loop(lambda descent: jnp.any(descent.going), go, start).verdict


def by_rule(rule: NodeRule, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Visit:
    """A visit that forms p, of ``logits [B, N, V]``, and judges by ``rule``; consumes the row keys ``[B]``.

    Its random numbers depend on the row's key and the depth alone, so that they are the same however many nodes and rows there
    are. A greedy row's p is one-hot, so that it too goes where its argmax is.
    """

    def visit(draft: Draft, node: jax.Array, depth: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        at_node = without_stop_tokens(at_nodes(logits, node), sampling, depth)
        p = probabilities(at_node, sampling)
        return *rule(draft, node, p, _fold_in(keys, depth)), can_be_drawn(at_node)

    return visit


@shape_checked
def matching(
    draft: Draft, node: Int[Array, " B"], p: Float[Array, "B V"], keys: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Children that were chosen, not drawn: go to the one that holds the token which the target itself draws from p.

    To visit them in order, accept x with probability p(x) and otherwise set p(x) = 0 and renormalise, comes to the same.
    Dividing by the drafter's own probability would be biased. A `NodeRule`.
    """
    return _holding(draft, node, draw(p, keys))


def _holding(draft: Draft, node: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The child of ``node [B]`` that holds ``token [B]``, -1 where there is none; and the token."""
    holds = (jnp.asarray(draft.parents) == node[:, None]) & (draft.tokens == token[:, None]) & _drafted(draft)
    return jnp.max(jnp.where(holds, jnp.arange(holds.shape[1], dtype=jnp.int32), -1), axis=1), token


@struct.dataclass
class _Trial:
    """The children of one node, judged one after the other.

    Attributes:
        child: ``[B]`` number of the child to be judged; -1 when there is none left.
        accepted: ``[B]`` bool, whether ``child`` has been accepted, which ends the trial.
        p: ``[B, V]`` what the token after the node is still to be drawn from.
        q: ``[B, V]`` what the child was drawn from.
    """

    child: jax.Array
    accepted: jax.Array
    p: jax.Array
    q: jax.Array


@shape_checked
def recursive_rejection(
    draft: Draft, node: Int[Array, " B"], p: Float[Array, "B V"], keys: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Children that were drawn from q without replacement: judge one after the other, until one is accepted.

    Accept x with probability min(1, p(x)/q(x)); on rejection p becomes norm(max(0, p - q)) and q loses x, renormalised.
    Where all are rejected the token is drawn from what p has become. A `NodeRule`.

    SpecInfer (Miao et al. 2023, arXiv 2305.09781, section 4.3), with siblings without replacement as in Sequoia (Chen et al.
    2024, arXiv 2402.12374, algorithm 2).
    """
    assert draft.q is not None
    accept_keys, token_keys = split_keys(keys, 2)
    first, next_sibling = tree.first_children(draft.parents), tree.next_siblings(draft.parents)

    def following(order: Any, node: jax.Array) -> jax.Array:  # a child that was not drafted ends the row of siblings
        child = at_nodes(jnp.broadcast_to(jnp.asarray(order, jnp.int32), draft.tokens.shape), node)
        return jnp.where((child >= 0) & at_nodes(_drafted(draft), jnp.maximum(child, 0)), child, -1)

    def waiting(trial: _Trial) -> jax.Array:
        return (trial.child >= 0) & ~trial.accepted

    def judge(trial: _Trial) -> _Trial:
        child = jnp.maximum(trial.child, 0)
        x = at_nodes(draft.tokens, child)
        u = jax.vmap(partial(jax.random.uniform, dtype=jnp.float32))(_fold_in(accept_keys, child))
        # u < p/q without the division, for q(x) can be 0 in a greedy row. There q is one-hot: say it is (1, 0, 0), and the
        # children are tokens 0, 1 and 2 in this order. Token 0 rejected, q has nothing left and is 0 everywhere. Token 1 is
        # then accepted if 0 < p(1), and as p is one-hot too, that is if token 1 is the target's argmax.
        accept = waiting(trial) & (u * at_nodes(trial.q, x) < at_nodes(trial.p, x))
        reject = waiting(trial) & ~accept
        residual = jnp.maximum(0.0, trial.p - trial.q)
        rest = jnp.where(jnp.arange(p.shape[-1])[None] == x[:, None], 0.0, trial.q)
        return _Trial(
            child=jnp.where(reject, following(next_sibling, child), trial.child),
            accepted=trial.accepted | accept,
            p=jnp.where(reject[:, None], _normalised(residual, otherwise=trial.p), trial.p),
            q=jnp.where(reject[:, None], _normalised(rest, otherwise=rest), trial.q),
        )

    start = _Trial(
        child=following(first, node),
        accepted=jnp.zeros(node.shape, bool),
        p=p,
        q=at_nodes(draft.q, node),
    )
    end = jax.lax.while_loop(lambda trial: jnp.any(waiting(trial)), judge, start)
    return jnp.where(end.accepted, end.child, -1), draw(end.p, token_keys)


def _drafted(draft: Draft) -> jax.Array:
    """``[B, N]`` bool, the nodes that may be accepted, the root among them."""
    return jnp.pad(draft.drafted, ((0, 0), (1, 0)), constant_values=True)


def _normalised(mass: jax.Array, otherwise: jax.Array) -> jax.Array:
    """``mass [B, V]`` divided by its sum; ``otherwise`` where that is 0."""
    total = jnp.sum(mass, axis=-1, keepdims=True)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), otherwise)


@shape_checked
def rejection(
    p: Distributions, q: Float[Array, "B N V"], x: Int[Array, "B gamma"], drafted: Any, keys: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Speculative sampling: accept x with probability min(1, p(x)/q(x)), else draw from norm(max(0, p - q)).

    Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1; q counts as 0 at nodes below which nothing was ``drafted [B,
    gamma]``: there the residual is p itself, and the bonus token falls out of it.

    Returns:
        ``([B] accepted tokens, [B] the token after them)``.
    """
    accept_keys, token_keys = split_keys(keys, 2)
    u = _uniform(accept_keys, x.shape[1])
    # u < p/q without the division. q(x) > 0, for x was drawn from q.
    accepted = _leading((u * _of(q, x) < _of_p(p, x)) & drafted)
    residual = _residual(jnp.ones_like(accepted, jnp.float32), p, q, drafted, accepted)
    return accepted, draw(residual, token_keys)


@shape_checked
def block(
    p: Distributions, q: Float[Array, "B N V"], x: Int[Array, "B gamma"], drafted: Any, keys: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Block verification: accept the longest prefix that passes, judged jointly.

    Sun et al. 2024, arXiv 2403.10444, Algorithm 2; q counts as 0 at nodes below which nothing was ``drafted [B, gamma]``,
    which makes h equal its own value at the end of the chain, p_gamma.

    Returns:
        ``([B] accepted tokens, [B] the token after them)``.
    """
    accept_keys, token_keys = split_keys(keys, 2)

    def joint_ratio(ratio: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        p_x, q_x = pair  # p_i = min(1, p_{i-1} * p(x_i) / q(x_i)), equation (4)
        ratio = jnp.minimum(1.0, ratio * p_x / jnp.where(q_x > 0, q_x, 1.0))
        return ratio, ratio

    first = jnp.ones(x.shape[0], jnp.float32)
    _, ratios = jax.lax.scan(joint_ratio, first, (_of_p(p, x).T, _of(q, x).T))
    ratios = jnp.concatenate([first[None], ratios]).T  # [B, N]
    # What max(0, ratio * p - q) sums up to; with q = 0 that is the ratio.
    excess = jnp.where(_is_parent(drafted), p.excess(ratios, q), ratios)
    below = excess + (1.0 - ratios)
    h = jnp.where(below > 0, excess / jnp.where(below > 0, below, 1.0), 0.0)  # equation (5)
    passes = (_uniform(accept_keys, x.shape[1]) < h[:, 1:]) & drafted
    accepted = jnp.max(jnp.where(passes, jnp.arange(1, x.shape[1] + 1, dtype=jnp.int32), 0), axis=1, initial=0)
    return accepted, draw(_residual(at_nodes(ratios, accepted), p, q, drafted, accepted), token_keys)


@dataclass(frozen=True)
class VerificationRule:
    """How drafts are verified. Every rule keeps the target's distribution.

    Attributes:
        verify: the function, with the arguments of `verify`.
        takes_trees: whether it verifies drafts of any shape; otherwise chains alone.
        keys_by_position: whether its random numbers belong to positions, and the drafter has the same
            (`specjax.sampling.RowSampling.coupled`); otherwise drafters draw with their own, and hand over q.
    """

    verify: Callable[[Draft, jax.Array, RowSampling, jax.Array], Verdict]
    takes_trees: bool = True
    keys_by_position: bool = False


RULES: dict[Rule, VerificationRule] = {
    "coupled": VerificationRule(coupled, keys_by_position=True),
    "independent": VerificationRule(independent),
    "block": VerificationRule(partial(independent, judge_chain=block), takes_trees=False),
    "rejection": VerificationRule(partial(independent, judge_chain=rejection), takes_trees=False),
}
"""Every rule by the name that users give it. A new one is an entry here, and its name in `specjax.sampling.Rule`. Drafters know
whether numbers belong to positions by `specjax.sampling.RowSampling.coupled`, for they lie below this module."""


def _residual(ratio: jax.Array, p: Distributions, q: jax.Array, drafted: jax.Array, node: jax.Array) -> jax.Array:
    """``[B, V]`` max(0, ratio * p - q) at each row's ``node [B]``, not normalised."""
    p_there = p.at(node)
    q_there = jnp.where(at_nodes(_is_parent(drafted), node)[:, None], at_nodes(q, node), 0.0)
    residual = jnp.maximum(0.0, ratio[:, None] * p_there - q_there)
    # Where p and q agree to the last bit a rejection has probability 0, but rounding may still call for a token.
    return jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, p_there)


def _is_parent(drafted: jax.Array) -> jax.Array:
    """``[B, N]`` whether a token was drafted below each node of a chain, of ``drafted [B, gamma]``."""
    return jnp.pad(drafted, ((0, 0), (0, 1)))


def _leading(passed: jax.Array) -> jax.Array:
    """``[B]`` how many of ``passed [B, gamma]`` hold before the first that does not."""
    return jnp.sum(jnp.cumprod(passed, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def _of(values: jax.Array, x: jax.Array) -> jax.Array:
    """``[B, gamma]`` of ``values [B, N, V]``: node i's value of the token drafted below it."""
    return jnp.take_along_axis(values, jnp.pad(x, ((0, 0), (0, 1)))[..., None], axis=-1)[:, :-1, 0]


def _of_p(p: Distributions, x: jax.Array) -> jax.Array:
    """``[B, gamma]``: node i's probability of the token drafted below it."""
    return p.of(jnp.pad(x, ((0, 0), (0, 1))))[:, :-1]


def _fold_in(keys: jax.Array, number: jax.Array) -> jax.Array:
    """``[B]`` new keys from row keys ``[B]`` and a number, one for all rows or one a row."""
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(number, keys.shape))


def _uniform(keys: jax.Array, count: int) -> jax.Array:
    """``[B, count]`` in [0, 1), the first of them the same for every ``count``; consumes the row keys."""

    def row(key: jax.Array) -> jax.Array:
        return jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), dtype=jnp.float32))(jnp.arange(count))

    return jax.vmap(row)(keys)
