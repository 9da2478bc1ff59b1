"""Verification: decide which drafted tokens to keep, with exactly the target's distribution.

This module works on drafts and logits; it does not depend on drafters or models. Symbols are those
of the papers: p is the target's distribution, q the drafter's, x a drafted token, gamma the length
of a chain.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.adjustments import NO_TOKEN
from specjax.drafts import tree
from specjax.drafts.draft import Draft, Verdict
from specjax.sampling import (
    Distributions,
    RowSampling,
    Rule,
    argmax,
    at_nodes,
    before_temperature,
    can_be_drawn,
    distributions,
    draw,
    noise_of_rows,
    only_legal,
    perturbed,
    probabilities,
    split_keys,
    unpack_legal,
)
from specjax.shape_checks import shape_checked

NodeRule = Callable[[Draft, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""A rule for one node: ``(draft, node [B], p [B, V], keys [B]) -> (child [B], token [B])``.

p is the target's distribution after the node. The rule returns the child that is accepted; or -1,
and the token that is emitted instead. It consumes the keys.
"""


ChainRule = Callable[..., tuple[jax.Array, jax.Array]]
"""A rule for chains of drawn tokens.

``(p, q [B, N, V], x [B, gamma], drafted [B, gamma], keys [B]) -> (accepted [B], token [B])``
"""


def verify(
    draft: Draft,
    logits: jax.Array,
    sampling: RowSampling,
    keys: jax.Array,
    legal: jax.Array | None = None,
) -> Verdict:
    """Accept a path of the draft by the rule that ``sampling.rule`` selects from `RULES`.

    If all rows are greedy, all rules are equivalent to `follow_argmax`, which is used instead.

    If no token can be drawn from a node's logits (`specjax.sampling.can_be_drawn`), a path ends at
    that node, as if nothing had been drafted below it. A row whose path ends there emits no token
    after it: `Verdict.bad`. Whether a row gets to such a node, and by which tokens, depends on the
    target alone. A token whose q is NaN was not drawn from a distribution, so it counts as not
    drafted.

    Args:
        draft: a tree of N nodes.
        logits: ``[B, N, V]`` the target's logits at every node.
        sampling: the sampling parameters of the rows. Temperature and truncation apply to p as they
            were applied to q.
        keys: ``[B]`` random keys, which are consumed. For a rule with keys by position,
            ``[D + 1, B]``: for each depth, the keys of the positions below its nodes.
        legal: ``[B, N, ceil(V / 32)]`` uint32, one bit for each token: whether the row's grammar
            allows it after the node. None if no row has a grammar. The path never goes below a
            token that is not legal, so the bits of nodes below it do not matter.
    """
    if sampling.greedy and sampling.adjustments is None:
        allowed, is_legal, good = _allowed(logits, sampling, draft.depths, legal)
        return follow_argmax(draft, argmax(only_legal(allowed, is_legal)), good)
    if sampling.greedy:
        # Penalties depend on the path, so they are computed only at the nodes that a row visits.
        return descend(draft, _likeliest_child(logits, sampling, legal))
    return RULES[sampling.rule].verify(draft, logits, sampling, keys, legal)


def _allowed(
    logits: jax.Array,
    sampling: RowSampling,
    depth: Any,
    legal: jax.Array | None,
    path: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Return what the next token of some nodes is drawn from.

    Args:
        logits: ``[B, …, V]`` the target's logits at the nodes.
        sampling: the sampling parameters of the rows.
        depth: the depth of the nodes, as in `specjax.sampling.without_stop_tokens`.
        legal: ``[B, …, ceil(V / 32)]`` the bits of legal tokens, as in `verify`.
        path: ``[B, …, D]`` the tokens below the root on the path to each node, then -1; None if no
            row has penalties, biases or banned words.

    Returns:
        The logits as `before_temperature` changes them; ``[B, …, V]`` bool which tokens are
        legal, or None; and ``[B, …]`` bool whether a token can be drawn.
    """
    if legal is None:
        allowed = before_temperature(logits, sampling, depth, path=path)
        return allowed, None, can_be_drawn(allowed)
    is_legal = unpack_legal(legal, logits.shape[-1])
    allowed = before_temperature(logits, sampling, depth, path=path, legal=is_legal)
    # Both: a NaN is an error even if its token is not legal, as it would be in a free row.
    good = can_be_drawn(allowed) & can_be_drawn(only_legal(allowed, is_legal))
    return allowed, is_legal, good


def _allowed_at(
    draft: Draft,
    logits: jax.Array,
    sampling: RowSampling,
    path: jax.Array,
    depth: jax.Array,
    legal: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Return what `_allowed` does, for one node of each row.

    Args:
        draft: a tree of N nodes.
        logits: ``[B, N, V]``, at all nodes.
        sampling: the sampling parameters of the rows.
        path: ``[B, D + 1]`` the nodes from the root to the node, as in `Verdict.path`.
        depth: the depth of the node; the path is known up to there.
        legal: the legal tokens at all nodes, as in `verify`.
    """
    node = path[:, depth]
    words = None if legal is None else at_nodes(legal, node)
    tokens = None
    if sampling.adjustments is not None:
        tokens = jnp.take_along_axis(draft.tokens, path[:, 1:], axis=1)
        tokens = jnp.where(jnp.arange(draft.depth) < depth, tokens, NO_TOKEN)
    return _allowed(at_nodes(logits, node), sampling, depth, words, tokens)


def independent(
    draft: Draft,
    logits: jax.Array,
    sampling: RowSampling,
    keys: jax.Array,
    legal: jax.Array | None = None,
    judge_chain: ChainRule | None = None,
) -> Verdict:
    """Verify with random numbers that the drafter does not know, by the rule that fits the draft.

    Chosen tokens are verified by `matching`, drawn siblings by `recursive_rejection`, and a chain
    of drawn tokens by ``judge_chain``; None for `block`. The other arguments are those of `verify`,
    with keys ``[B]``.
    """
    if draft.q is None:
        return descend(draft, by_rule(matching, logits, sampling, keys, legal))
    if not draft.is_chain:
        return descend(draft, by_rule(recursive_rejection, logits, sampling, keys, legal))
    tokens_above = None
    if sampling.adjustments is not None:
        index = jnp.arange(draft.depth + 1)
        is_above = index[None, 1:] <= index[:, None]  # [N, gamma]
        tokens_above = jnp.where(is_above, draft.tokens[:, None, 1:], NO_TOKEN)
    allowed, is_legal, good = _allowed(logits, sampling, draft.depths, legal, tokens_above)
    p, x = distributions(allowed, sampling, is_legal), draft.tokens[:, 1:]
    # A drafter's q is NaN for all tokens or for none, so this condition does not depend on x and
    # cannot bias the output.
    drafted = draft.drafted & good[:, :-1] & ~jnp.isnan(_of(draft.q, x))
    drafted = jnp.cumprod(drafted, axis=1).astype(bool)
    # Where p is NaN any one-hot p will do: the chain ends there (see `drafted`), and `bad` discards
    # the token that is drawn. So the rules need no special case.
    p = replace(p, best=jnp.where(good, p.best, 0), is_certain=p.is_certain | ~good)
    accepted, token = (judge_chain or block)(p, draft.q, x, drafted, keys)
    path = jnp.broadcast_to(jnp.arange(draft.tokens.shape[1], dtype=jnp.int32), draft.tokens.shape)
    return Verdict(path=path, count=accepted + 1, token=token, bad=~at_nodes(good, accepted))


def follow_argmax(draft: Draft, best: jax.Array, good: jax.Array) -> Verdict:
    """Descend as long as a child is the target's likeliest token. No distribution is formed.

    This is verification if all rows are greedy.

    Args:
        draft: a tree of N nodes.
        best: ``[B, N]`` the target's likeliest token after each node.
        good: ``[B, N]`` bool, whether the node's logits have a likeliest token.
    """
    batch, nodes = draft.tokens.shape
    parents = jnp.broadcast_to(jnp.asarray(draft.parents), (batch, nodes))
    best_after, has_best = (
        jnp.take_along_axis(values, parents[:, 1:], axis=1) for values in (best, good)
    )
    matches = (draft.tokens[:, 1:] == best_after) & has_best & draft.drafted
    matches = jnp.pad(matches, ((0, 0), (1, 0)), constant_values=True)
    reached = jnp.all(matches[:, None] | ~draft.mask, axis=-1)
    last = argmax(jnp.where(reached, draft.depths, -1))
    paths = jnp.broadcast_to(
        tree.paths(draft.parents, draft.depth), (batch, nodes, draft.depth + 1)
    )
    depth = at_nodes(jnp.broadcast_to(draft.depths, (batch, nodes)), last)
    return Verdict(
        path=at_nodes(paths, last).astype(jnp.int32),
        count=depth.astype(jnp.int32) + 1,
        token=at_nodes(best, last),
        bad=~at_nodes(good, last),
    )


def coupled(
    draft: Draft,
    logits: jax.Array,
    sampling: RowSampling,
    keys: jax.Array,
    legal: jax.Array | None = None,
) -> Verdict:
    """Follow the child that holds the token that the target draws, with random numbers by position.

    At every node the target draws ``y = argmax(log p + G)``. G are the Gumbel numbers that belong
    to the next position of the text. That is an exact draw, and y is emitted whatever was drafted:
    the text depends on the row's key and on the target alone. More drafts are accepted than by
    `matching`, because the drafter knows G too, and proposes tokens that are likely given G.

    This is drafter-invariant decoding (Daliri et al. 2024, arXiv 2408.07978). For trees it works as
    exponential races do (arXiv 2504.15475).

    Args:
        draft: a tree of N nodes, drafted with the same keys or without random numbers.
        logits: ``[B, N, V]`` the target's logits at every node.
        sampling: the sampling parameters of the rows. Greedy rows have no G.
        keys: ``[D + 1, B]`` from `position_keys`.
        legal: the legal tokens, as in `verify`. The largest of all kept tokens, if it is legal, is
            also the largest of the legal ones: a free draw that is legal is the constrained one.
    """

    def visit(
        draft: Draft, path: jax.Array, depth: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        noise = noise_of_rows(keys[depth], logits.shape[-1], sampling)
        allowed, is_legal, good = _allowed_at(draft, logits, sampling, path, depth, legal)
        drawn_token = argmax(perturbed(allowed, sampling, noise, legal=is_legal))
        return *_holding(draft, path[:, depth], drawn_token), good

    return descend(draft, visit)


@struct.dataclass
class _Descent:
    """The progress of `descend`.

    Attributes:
        depth: scalar, the depth of the nodes that are visited next.
        going: ``[B]`` bool, the rows that still descend.
        verdict: the verdict so far. Its token is final for rows that have stopped.
    """

    depth: jax.Array
    going: jax.Array
    verdict: Verdict


Visit = Callable[[Draft, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
"""A visit of one node: ``(draft, path [B, D + 1], depth) -> (child [B], token [B], good [B])``.

The node is ``path[:, depth]``, and the path above it leads there from the root. The visit returns
the child that is accepted; or -1, and the token that is emitted instead; and whether a token can be
drawn after the node at all.
"""


def _likeliest_child(logits: jax.Array, sampling: RowSampling, legal: jax.Array | None) -> Visit:
    """Return a `Visit` for greedy rows, which follow the likeliest token."""

    def visit(
        draft: Draft, path: jax.Array, depth: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        allowed, is_legal, good = _allowed_at(draft, logits, sampling, path, depth, legal)
        return *_holding(draft, path[:, depth], argmax(only_legal(allowed, is_legal))), good

    return visit


def descend(draft: Draft, visit: Visit) -> Verdict:
    """Walk down from the root: ``visit`` selects a child at each node, or a token to end with.

    So p is computed at the visited nodes only, at most D + 1 for each row, and not at all N nodes.
    For 60 nodes and 128,000 tokens, p at all nodes would take 31 MB for each row, and truncation
    (top-k, top-p) reads p 64 times. The loop ends when the last row stops.

    Args:
        draft: a tree of N nodes.
        visit: the rule. For rows that have stopped, it sees a node without children.
    """

    def go(descent: _Descent) -> _Descent:
        depth, going, so_far = descent.depth, descent.going, descent.verdict
        below = replace(draft, valid=_drafted(draft) & going[:, None])
        child, token, good = visit(below, so_far.path, depth)
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
    # Plain decoding: one visit needs no loop, and no synchronization of host and device.
    if draft.depth == 0:
        return go(start).verdict
    return jax.lax.while_loop(lambda descent: jnp.any(descent.going), go, start).verdict


def by_rule(
    rule: NodeRule,
    logits: jax.Array,
    sampling: RowSampling,
    keys: jax.Array,
    legal: jax.Array | None = None,
) -> Visit:
    """Return a `Visit` that computes p from ``logits [B, N, V]`` and applies ``rule``.

    ``legal`` are the legal tokens, as in `verify`.

    It consumes the row keys ``[B]``. Its random numbers depend on the row's key and the depth
    alone, so they are the same for any number of nodes and rows. A greedy row's p is one-hot, so
    that the row follows the argmax under every rule.
    """

    def visit(
        draft: Draft, path: jax.Array, depth: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        allowed, is_legal, good = _allowed_at(draft, logits, sampling, path, depth, legal)
        p = probabilities(allowed, sampling, is_legal)
        return *rule(draft, path[:, depth], p, _fold_in(keys, depth)), good

    return visit


@shape_checked
def matching(
    draft: Draft, node: Int[Array, " B"], p: Float[Array, "B V"], keys: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Follow the child that holds the token that the target itself draws from p.

    This is the `NodeRule` for children that were chosen, not drawn. It is equivalent to visiting
    them in order: accept x with probability p(x), otherwise set p(x) = 0 and renormalise. Dividing
    by the drafter's own probability would be biased.
    """
    return _holding(draft, node, draw(p, keys))


def _holding(draft: Draft, node: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the child of ``node [B]`` that holds ``token [B]``, or -1, and the token."""
    holds = (
        (jnp.asarray(draft.parents) == node[:, None])
        & (draft.tokens == token[:, None])
        & _drafted(draft)
    )
    return jnp.max(jnp.where(holds, jnp.arange(holds.shape[1], dtype=jnp.int32), -1), axis=1), token


@struct.dataclass
class _Trial:
    """The trial of the children of one node, one after the other.

    Attributes:
        child: ``[B]`` index of the child to be judged next; -1 if none is left.
        accepted: ``[B]`` bool, whether ``child`` has been accepted, which ends the trial.
        p: ``[B, V]`` the distribution of the token after the node, given the rejections so far.
        q: ``[B, V]`` the distribution that the child was drawn from.
    """

    child: jax.Array
    accepted: jax.Array
    p: jax.Array
    q: jax.Array


@shape_checked
def recursive_rejection(
    draft: Draft, node: Int[Array, " B"], p: Float[Array, "B V"], keys: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Judge children that were drawn from q without replacement, until one is accepted.

    Accept x with probability min(1, p(x)/q(x)). On rejection p becomes norm(max(0, p - q)), and q
    loses x and is renormalised. If all children are rejected, the token is drawn from the last p.
    This is a `NodeRule`.

    The rule is that of SpecInfer (Miao et al. 2023, arXiv 2305.09781, section 4.3), with siblings
    without replacement as in Sequoia (Chen et al. 2024, arXiv 2402.12374, algorithm 2).
    """
    assert draft.q is not None
    accept_keys, token_keys = split_keys(keys, 2)
    first, next_sibling = tree.first_children(draft.parents), tree.next_siblings(draft.parents)

    def following(order: Any, node: jax.Array) -> jax.Array:
        by_row = jnp.broadcast_to(jnp.asarray(order, jnp.int32), draft.tokens.shape)
        child = at_nodes(by_row, node)
        # A child that was not drafted ends the list of siblings.
        is_drafted = at_nodes(_drafted(draft), jnp.maximum(child, 0))
        return jnp.where((child >= 0) & is_drafted, child, -1)

    def waiting(trial: _Trial) -> jax.Array:
        return (trial.child >= 0) & ~trial.accepted

    def judge(trial: _Trial) -> _Trial:
        child = jnp.maximum(trial.child, 0)
        x = at_nodes(draft.tokens, child)
        u = jax.vmap(partial(jax.random.uniform, dtype=jnp.float32))(_fold_in(accept_keys, child))
        # This is u < p/q without the division, because q(x) can be 0 in a greedy row. There q is
        # one-hot: say (1, 0, 0), with the children 0, 1 and 2 in this order. If token 0 is
        # rejected, no mass is left and q is 0 everywhere. Token 1 is then accepted if 0 < p(1). As
        # p is one-hot too, that is the case if token 1 is the target's argmax.
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
    """Return ``[B, N]`` bool, the nodes that may be accepted, the root included."""
    return jnp.pad(draft.drafted, ((0, 0), (1, 0)), constant_values=True)


def _normalised(mass: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Divide ``mass [B, V]`` by its sum, or return ``otherwise`` where the sum is 0."""
    total = jnp.sum(mass, axis=-1, keepdims=True)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), otherwise)


@shape_checked
def rejection(
    p: Distributions, q: Float[Array, "B N V"], x: Int[Array, "B gamma"], drafted: Any, keys: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Verify a chain by speculative sampling.

    Accept x with probability min(1, p(x)/q(x)), else draw from norm(max(0, p - q)). q counts as 0
    at nodes below which nothing was ``drafted [B, gamma]``. There the residual is p itself, so that
    the bonus token needs no special case.

    See Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1.

    Returns:
        ``[B]`` the number of accepted tokens, and ``[B]`` the token after them.
    """
    accept_keys, token_keys = split_keys(keys, 2)
    u = _uniform(accept_keys, x.shape[1])
    # This is u < p/q without the division; q(x) > 0, because x was drawn from q.
    accepted = _leading((u * _of(q, x) < _of_p(p, x)) & drafted)
    residual = _residual(jnp.ones_like(accepted, jnp.float32), p, q, drafted, accepted)
    return accepted, draw(residual, token_keys)


@shape_checked
def block(
    p: Distributions, q: Float[Array, "B N V"], x: Int[Array, "B gamma"], drafted: Any, keys: Any
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Verify a chain by block verification: accept the longest prefix that passes a joint test.

    q counts as 0 at nodes below which nothing was ``drafted [B, gamma]``. At the end of the chain
    that makes h equal p_gamma, as the algorithm demands.

    See Sun et al. 2024, arXiv 2403.10444, Algorithm 2.

    Returns:
        ``[B]`` the number of accepted tokens, and ``[B]`` the token after them.
    """
    accept_keys, token_keys = split_keys(keys, 2)

    def joint_ratio(
        ratio: jax.Array, pair: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        p_x, q_x = pair  # p_i = min(1, p_{i-1} * p(x_i) / q(x_i)), equation (4)
        ratio = jnp.minimum(1.0, ratio * p_x / jnp.where(q_x > 0, q_x, 1.0))
        return ratio, ratio

    first = jnp.ones(x.shape[0], jnp.float32)
    _, ratios = jax.lax.scan(joint_ratio, first, (_of_p(p, x).T, _of(q, x).T))
    ratios = jnp.concatenate([first[None], ratios]).T  # [B, N]
    # The sum of max(0, ratio * p - q) over the vocabulary. Where q counts as 0 it is the ratio.
    excess = jnp.where(_is_parent(drafted), p.excess(ratios, q), ratios)
    below = excess + (1.0 - ratios)
    h = jnp.where(below > 0, excess / jnp.where(below > 0, below, 1.0), 0.0)  # equation (5)
    passes = (_uniform(accept_keys, x.shape[1]) < h[:, 1:]) & drafted
    accepted = jnp.max(
        jnp.where(passes, jnp.arange(1, x.shape[1] + 1, dtype=jnp.int32), 0), axis=1, initial=0
    )
    return accepted, draw(
        _residual(at_nodes(ratios, accepted), p, q, drafted, accepted), token_keys
    )


@dataclass(frozen=True)
class VerificationRule:
    """A rule by which drafts are verified. Every rule preserves the target's distribution.

    Attributes:
        verify: the function, with the arguments of `verify`.
        takes_trees: whether it verifies drafts of any shape; otherwise it verifies chains only.
        keys_by_position: whether its random numbers belong to positions, so that the drafter uses
            the same (`specjax.sampling.RowSampling.coupled`). Otherwise drafters draw with random
            numbers of their own, and pass q to verification.
    """

    verify: Callable[[Draft, jax.Array, RowSampling, jax.Array, jax.Array | None], Verdict]
    takes_trees: bool = True
    keys_by_position: bool = False


RULES: dict[Rule, VerificationRule] = {
    "coupled": VerificationRule(coupled, keys_by_position=True),
    "independent": VerificationRule(independent),
    "block": VerificationRule(partial(independent, judge_chain=block), takes_trees=False),
    "rejection": VerificationRule(partial(independent, judge_chain=rejection), takes_trees=False),
}
"""All rules by name.

To add a rule, add an entry here and its name to `specjax.sampling.Rule`. Drafters are below this
module in the import order, so they read `specjax.sampling.RowSampling.coupled` to learn whether
random numbers belong to positions.
"""


def _residual(
    ratio: jax.Array, p: Distributions, q: jax.Array, drafted: jax.Array, node: jax.Array
) -> jax.Array:
    """Return ``[B, V]`` max(0, ratio * p - q) at each row's ``node [B]``, not normalised."""
    p_node = p.at(node)
    q_node = jnp.where(at_nodes(_is_parent(drafted), node)[:, None], at_nodes(q, node), 0.0)
    residual = jnp.maximum(0.0, ratio[:, None] * p_node - q_node)
    # If p equals q, the residual is 0 and a rejection has probability 0. Rounding may still cause
    # one: then draw from p.
    return jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, p_node)


def _is_parent(drafted: jax.Array) -> jax.Array:
    """Return ``[B, N]``, whether a token was drafted below each node of a chain.

    ``drafted`` is ``[B, gamma]``.
    """
    return jnp.pad(drafted, ((0, 0), (0, 1)))


def _leading(passed: jax.Array) -> jax.Array:
    """Return ``[B]`` the number of leading True values of ``passed [B, gamma]``."""
    return jnp.sum(jnp.cumprod(passed, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def _of(values: jax.Array, x: jax.Array) -> jax.Array:
    """Return each node's value of the token drafted below it, ``[B, gamma]``.

    ``values`` is ``[B, N, V]``.
    """
    return jnp.take_along_axis(values, jnp.pad(x, ((0, 0), (0, 1)))[..., None], axis=-1)[:, :-1, 0]


def _of_p(p: Distributions, x: jax.Array) -> jax.Array:
    """Return ``[B, gamma]``, each node's probability p of the token drafted below it."""
    return p.of(jnp.pad(x, ((0, 0), (0, 1))))[:, :-1]


def _fold_in(keys: jax.Array, index: jax.Array) -> jax.Array:
    """Fold an index into the row keys ``[B]``, one index for all rows or one for each row."""
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(index, keys.shape))


def _uniform(keys: jax.Array, count: int) -> jax.Array:
    """Return ``[B, count]`` random numbers in [0, 1), and consume the row keys.

    The first numbers are the same for every ``count``.
    """

    # One key per number: a single draw of ``count`` numbers would depend on ``count``.
    def row(key: jax.Array) -> jax.Array:
        return jax.vmap(
            lambda i: jax.random.uniform(jax.random.fold_in(key, i), dtype=jnp.float32)
        )(jnp.arange(count))

    return jax.vmap(row)(keys)
