"""The expected gain of speculation in closed form.

The symbols are those of the papers: alpha is the probability that a drafted token is accepted
(assumed independent of the others), gamma is the length of the drafted chain, c is the time of a
drafting step divided by that of a target pass, and c-hat is the same ratio of arithmetic
operations. Leviathan et al. 2023, arXiv 2211.17192, assume that a pass over gamma + 1 tokens takes
as long as a pass over one token. MagicDec, arXiv 2408.11049, uses three times instead, as does
`speedup_from_times`.

Two formulas that circulate are wrong:

- Speed-up = ``1 / (1/gamma + 1/alpha)``. That is below 1 for every alpha and gamma, so speculation
  would never pay off.
- "50% acceptance with 5 drafted tokens gives 3 tokens per step". It counts the tokens after a
  rejection, which are discarded. Without them it is ``(1 - 0.5**6) / (1 - 0.5) = 1.97``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specjax.drafts.shapes import Choices
from specjax.errors import InputError

LONGEST = 64
"""The default length in tokens of the longest chain that `best_gamma` tries."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return the tokens per target pass, with the bonus token: (1 - alpha^(gamma+1)) / (1 - alpha).

    This is equation (1) of Leviathan et al. 2023, and MagicDec's Omega(gamma, alpha). It is summed
    term by term, so that alpha = 1 is not a special case: the i-th drafted token is emitted if all
    i tokens up to it are accepted.

    Examples:
        >>> from specjax.planning import theory
        >>> theory.expected_tokens(alpha=0.8, gamma=4)
        3.3616
    """
    _check_alpha(alpha)
    _check_gamma(gamma)
    return math.fsum(alpha**i for i in range(gamma + 1))


def walltime_factor(alpha: float, gamma: int, cost: float) -> float:
    """Return the speed-up over plain decoding, expected tokens / (gamma c + 1); ``cost`` is c.

    This is Theorem 3.8 of Leviathan et al. 2023.

    Examples:
        >>> from specjax.planning import theory
        >>> round(theory.walltime_factor(alpha=0.8, gamma=4, cost=0.05), 2)
        2.8
    """
    _check_positive("cost", cost)
    return expected_tokens(alpha, gamma) / (gamma * cost + 1)


def operations_factor(alpha: float, gamma: int, operations: float) -> float:
    """Return the arithmetic operations per token, relative to plain decoding.

    They are (gamma c_hat + gamma + 1) / expected tokens (Leviathan et al. 2023, Theorem 3.11).
    ``operations`` is c_hat, the drafter's operations per token divided by the target's.

    Examples:
        >>> from specjax.planning import theory
        >>> round(theory.operations_factor(alpha=0.8, gamma=4, operations=0.05), 2)
        1.55
    """
    _check_positive("operations", operations)
    return (gamma * operations + gamma + 1) / expected_tokens(alpha, gamma)


def memory_factor(alpha: float, gamma: int) -> float:
    """Return the factor by which reads of the target's weights and cache per token decrease.

    A pass reads them once, so the factor is the number of expected tokens (Leviathan et al. 2023,
    section 3.4). The drafter's own reads are not counted.

    Examples:
        >>> from specjax.planning import theory
        >>> theory.memory_factor(alpha=0.8, gamma=4)
        3.3616
    """
    return expected_tokens(alpha, gamma)


@dataclass(frozen=True)
class GammaChoice:
    """A chain length and its speed-up over plain decoding, which is ``gamma = 0``.

    Examples:
        >>> from specjax.planning import theory
        >>> theory.GammaChoice(gamma=0, factor=1.0)  # plain decoding
        GammaChoice(gamma=0, factor=1.0)
    """

    gamma: int
    factor: float


def best_gamma(alpha: float, cost: float, longest: int = LONGEST) -> GammaChoice:
    """Return the chain of at most ``longest`` tokens with the largest `walltime_factor`.

    Among equals it is the shortest. It is 0 if speculation does not pay off, which is so for
    alpha <= c: the i-th drafted token adds alpha^i <= c expected tokens and takes a time of c. For
    alpha > c, a chain of 1 already gains (1 + alpha) / (1 + c). For alpha = 1 and c < 1, a longer
    chain is always faster, so the result is ``longest``. See Leviathan et al. 2023, section 3.5 and
    Corollary 3.9.

    Examples:
        >>> from specjax.planning import theory
        >>> theory.best_gamma(alpha=0.8, cost=0.05).gamma
        8
        >>> theory.best_gamma(alpha=0.1, cost=0.2)  # does not pay
        GammaChoice(gamma=0, factor=1.0)
    """
    _check_gamma(longest, "longest")
    choices = (
        GammaChoice(gamma, walltime_factor(alpha, gamma, cost)) for gamma in range(longest + 1)
    )
    return max(choices, key=lambda choice: choice.factor)  # max returns the first of equals


def time_per_token(draft_time: float, verify_time: float, gamma: int, tokens: float) -> float:
    """Return the seconds per emitted token: (gamma T_D + T_V(gamma)) / Omega.

    See MagicDec, section 3.1.

    Args:
        draft_time: T_D, the seconds of a drafting step.
        verify_time: T_V(gamma), the seconds of a target pass over the chain and its root.
        gamma: the number of drafting steps before a verification.
        tokens: Omega, the tokens emitted per verification: `expected_tokens`, or a measured
            acceptance length.

    Examples:
        >>> from specjax.planning import theory
        >>> seconds = theory.time_per_token(
        ...     draft_time=0.001, verify_time=0.011, gamma=4, tokens=3.0
        ... )
        >>> round(seconds, 6)
        0.005
    """
    _check_gamma(gamma)
    for name, value in (
        ("draft_time", draft_time),
        ("verify_time", verify_time),
        ("tokens", tokens),
    ):
        _check_positive(name, value)
    return (gamma * draft_time + verify_time) / tokens


def speedup_from_times(
    target_time: float, draft_time: float, verify_time: float, gamma: int, tokens: float
) -> float:
    """Return the speed-up over plain decoding from times, T_T / `time_per_token`.

    The times are measured or modeled. This is the inverse of equation (2) of MagicDec.
    ``target_time`` is T_T, the seconds of a target pass over one token. The other arguments are
    those of `time_per_token`.

    Examples:
        >>> from specjax.planning import theory
        >>> gain = theory.speedup_from_times(
        ...     target_time=0.010, draft_time=0.001, verify_time=0.011, gamma=4, tokens=3.0
        ... )
        >>> round(gain, 6)
        2.0
    """
    _check_positive("target_time", target_time)
    return target_time / time_per_token(draft_time, verify_time, gamma, tokens)


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:  # NaN compares false
        raise InputError(f"alpha={alpha:g}: an acceptance rate must be between 0 and 1")


def _check_gamma(gamma: int, name: str = "gamma") -> None:
    if gamma < 0:
        raise InputError(f"{name}={gamma}: a number of drafted tokens must be at least 0")


_POSITIVE = {
    "cost": (
        "the time of a drafting step over a target forward's; a drafter that costs next to nothing"
        " has 0.001"
    ),
    "operations": (
        "the drafter's operations a token over the target's; a drafter that takes next to none has"
        " 0.001"
    ),
    "target_time": "seconds of one target forward",
    "draft_time": "seconds of one drafting step",
    "verify_time": "seconds of one verification",
    "tokens": "tokens emitted a verification, the bonus token included",
}


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{name}={value:g}: must be above 0 and finite ({_POSITIVE[name]})")


# --- trees ----------------------------------------------------------------------------------------


def tree_tokens(acceptance: Sequence[float], choices: Choices) -> float:
    """Return the tokens per target pass with a tree, with the bonus token.

    They are the sum of the probabilities that each node is accepted, the root included. A child of
    rank r is accepted with probability ``acceptance[r]``, whatever came before (the positional
    acceptance of Sequoia, Chen et al. 2024, arXiv 2402.12374, section 4.1).

    Examples:
        >>> from specjax.planning import theory
        >>> round(theory.tree_tokens((0.6, 0.2), ((0,), (1,), (0, 0))), 2)  # 1 + 0.6 + 0.2 + 0.36
        2.16
    """
    _check_acceptance(acceptance)
    return 1 + math.fsum(math.prod(acceptance[rank] for rank in path) for path in choices)


def best_trees(
    acceptance: Sequence[float], nodes: int, depth: int
) -> dict[tuple[int, int], Choices]:
    """Return for each number of nodes and depth the tree with the most `tree_tokens`.

    This is Sequoia's dynamic programming (Chen et al. 2024, arXiv 2402.12374, section 4.2). The
    best tree of n nodes gives its first child the best subtree of some size, its second child
    another one, and so on. So the value of a root with at most r children and d levels below it is

        c(n, d, r) = max over m of c(n - m, d, r - 1) + p_r * max over k of c(m, d - 1, k)

    The complexity is O(nodes^2 * depth * ranks).

    Args:
        acceptance: the probability that the child of each rank is accepted, by rank.
        nodes: the maximum number of nodes with the root, at least 2.
        depth: the maximum depth, at least 1.

    Returns:
        The trees, ``{(nodes, depth): choices}``. The number of nodes includes the root.

    Examples:
        >>> from specjax.planning import theory
        >>> trees = theory.best_trees((0.6, 0.2), nodes=4, depth=2)
        >>> trees[4, 2]
        ((0,), (1,), (0, 0))
    """
    _check_acceptance(acceptance)
    if nodes < 2 or depth < 1:
        raise InputError(
            f"nodes={nodes}, depth={depth}: a tree has at least 2 nodes, the root included, and"
            " depth 1"
        )
    ranks = len(acceptance)
    # worth[d, r, n] is c(n, d, r), and 0 for n = 0; last_child_nodes[d, r, n] is its m.
    worth = np.zeros((depth + 1, ranks + 1, nodes + 1))
    worth[:, :, 1:] = 1.0
    last_child_nodes = np.zeros((depth + 1, ranks + 1, nodes + 1), int)
    for d in range(1, depth + 1):
        subtree = worth[d - 1].max(axis=0)
        for r in range(1, ranks + 1):
            for n in range(1, nodes + 1):
                m = np.arange(n)  # the root itself keeps one node
                value = worth[d, r - 1, n - m] + acceptance[r - 1] * subtree[m]
                last_child_nodes[d, r, n] = int(np.argmax(value))
                worth[d, r, n] = value.max()

    def children(n: int, d: int, r: int) -> list[tuple[int, ...]]:
        if n <= 1 or d == 0 or r == 0:
            return []
        m = int(last_child_nodes[d, r, n])
        below = [] if m == 0 else [(r - 1,)] + [(r - 1, *path) for path in best_tree(m, d - 1)]
        return children(n - m, d, r - 1) + below

    def best_tree(n: int, d: int) -> list[tuple[int, ...]]:
        return children(n, d, int(np.argmax(worth[d, :, n])))

    trees = {}
    for d in range(1, depth + 1):
        for n in range(2, nodes + 1):
            choices = tuple(sorted(best_tree(n, d), key=lambda path: (len(path), path)))
            if len(choices) == n - 1 and max(map(len, choices)) == d:
                trees[n, d] = choices
    return trees


def _check_acceptance(acceptance: Sequence[float]) -> None:
    if not acceptance or min(acceptance) < 0 or not math.fsum(acceptance) <= 1 + 1e-6:
        raise InputError(
            f"acceptance={tuple(acceptance)}: give probabilities by rank, at least 0, with a sum of"
            " at most 1"
        )
