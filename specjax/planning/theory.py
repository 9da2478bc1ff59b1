"""What speculation should gain, in closed form.

Symbols as in the papers: alpha the chance that a drafted token is accepted (taken as independent of the others), gamma the
length of the drafted chain, c the time of one drafting step over the time of one target forward, c-hat the same ratio of
arithmetic operations. Leviathan et al. 2023, arXiv 2211.17192, assume that a forward over gamma + 1 tokens takes as long as
one over a single token; MagicDec, arXiv 2408.11049, asks for the three times instead, and so does `speedup_from_times`.

Two formulas that circulate are wrong:

- Speed-up = ``1 / (1/gamma + 1/alpha)``. That is below 1 for every alpha and gamma, so speculation would never pay.
- "50% acceptance with 5 drafted tokens gives 3 tokens a step". It counts the tokens after a rejection, which are dropped;
  with them gone it is ``(1 - 0.5**6) / (1 - 0.5) = 1.97``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specjax.drafts.shapes import Choices
from specjax.errors import InputError

LONGEST = 64
"""The longest chain that `best_gamma` tries unless told otherwise, in tokens."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens emitted a target forward, the bonus token included: (1 - alpha^(gamma+1)) / (1 - alpha).

    Leviathan et al. 2023, equation (1); MagicDec's Omega(gamma, alpha). Summed term by term, so that alpha = 1 is no special
    case: the i-th drafted token is emitted when all i up to it were accepted.

    Examples:
        >>> from specjax.planning import theory
        >>> theory.expected_tokens(alpha=0.8, gamma=4)
        3.3616
    """
    _check_alpha(alpha)
    _check_gamma(gamma)
    return math.fsum(alpha**i for i in range(gamma + 1))


def walltime_factor(alpha: float, gamma: int, cost: float) -> float:
    """Speed-up over plain decoding: expected tokens over (gamma c + 1), where ``cost`` is c.

    Leviathan et al. 2023, Theorem 3.8.

    Examples:
        >>> from specjax.planning import theory
        >>> round(theory.walltime_factor(alpha=0.8, gamma=4, cost=0.05), 2)
        2.8
    """
    _check_positive("cost", cost)
    return expected_tokens(alpha, gamma) / (gamma * cost + 1)


def operations_factor(alpha: float, gamma: int, operations: float) -> float:
    """Arithmetic operations a token over those of plain decoding: (gamma c_hat + gamma + 1) over the expected tokens.

    Leviathan et al. 2023, Theorem 3.11. ``operations`` is c_hat: the drafter's operations a token over the target's.

    Examples:
        >>> from specjax.planning import theory
        >>> round(theory.operations_factor(alpha=0.8, gamma=4, operations=0.05), 2)
        1.55
    """
    _check_positive("operations", operations)
    return (gamma * operations + gamma + 1) / expected_tokens(alpha, gamma)


def memory_factor(alpha: float, gamma: int) -> float:
    """How many times fewer reads of the target's weights and cache a token takes: one read a forward, so the expected tokens.

    Leviathan et al. 2023, section 3.4. The drafter's own reads are not counted.

    Examples:
        >>> from specjax.planning import theory
        >>> theory.memory_factor(alpha=0.8, gamma=4)
        3.3616
    """
    return expected_tokens(alpha, gamma)


@dataclass(frozen=True)
class Choice:
    """A chain length and its speed-up over plain decoding. ``gamma = 0`` is plain decoding.

    Examples:
        >>> from specjax.planning import theory
        >>> theory.Choice(gamma=0, factor=1.0)  # plain decoding
        Choice(gamma=0, factor=1.0)
    """

    gamma: int
    factor: float


def best_gamma(alpha: float, cost: float, longest: int = LONGEST) -> Choice:
    """The chain of at most ``longest`` tokens with the largest `walltime_factor`, the shortest among equals.

    0 where speculation does not pay, which is where alpha <= c: the i-th drafted token adds alpha^i <= c expected tokens and c
    to the time. Where alpha > c, a chain of 1 already gains (1 + alpha) / (1 + c). With alpha = 1 and c < 1 a longer chain is
    always faster: the answer is ``longest``. Leviathan et al. 2023, section 3.5 and Corollary 3.9.

    Examples:
        >>> from specjax.planning import theory
        >>> theory.best_gamma(alpha=0.8, cost=0.05).gamma
        8
        >>> theory.best_gamma(alpha=0.1, cost=0.2)  # does not pay
        Choice(gamma=0, factor=1.0)
    """
    _check_gamma(longest, "longest")
    choices = (Choice(gamma, walltime_factor(alpha, gamma, cost)) for gamma in range(longest + 1))
    return max(choices, key=lambda choice: choice.factor)  # of equals, max returns the first


def time_per_token(draft_time: float, verify_time: float, gamma: int, tokens: float) -> float:
    """Seconds an emitted token takes: (gamma T_D + T_V(gamma)) / Omega.

    MagicDec, section 3.1.

    Args:
        draft_time: T_D, seconds of one drafting step.
        verify_time: T_V(gamma), seconds of one target forward over the chain and its root.
        gamma: drafting steps before a verification.
        tokens: Omega, the tokens emitted a verification: `expected_tokens`, or a measured acceptance length.

    Examples:
        >>> from specjax.planning import theory
        >>> seconds = theory.time_per_token(
        ...     draft_time=0.001, verify_time=0.011, gamma=4, tokens=3.0
        ... )
        >>> round(seconds, 6)
        0.005
    """
    _check_gamma(gamma)
    for name, value in (("draft_time", draft_time), ("verify_time", verify_time), ("tokens", tokens)):
        _check_positive(name, value)
    return (gamma * draft_time + verify_time) / tokens


def speedup_from_times(target_time: float, draft_time: float, verify_time: float, gamma: int, tokens: float) -> float:
    """Speed-up over plain decoding from times, measured or modelled: T_T over `time_per_token`.

    MagicDec, the inverse of equation (2). ``target_time`` is T_T, the seconds of one target forward over one token; the other
    arguments are those of `time_per_token`.

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
        raise InputError(f"alpha={alpha:g}: an acceptance rate lies between 0 and 1")


def _check_gamma(gamma: int, name: str = "gamma") -> None:
    if gamma < 0:
        raise InputError(f"{name}={gamma}: a number of drafted tokens is at least 0")


_POSITIVE = {
    "cost": "the time of a drafting step over a target forward's; a drafter that costs next to nothing has 0.001",
    "operations": "the drafter's operations a token over the target's; a drafter that takes next to none has 0.001",
    "target_time": "seconds of one target forward",
    "draft_time": "seconds of one drafting step",
    "verify_time": "seconds of one verification",
    "tokens": "tokens emitted a verification, the bonus token included",
}


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise InputError(f"{name}={value:g}: must be above 0 and finite ({_POSITIVE[name]})")


# --- trees -----------------------------------------------------------------------------------------------------------


def tree_tokens(acceptance: Sequence[float], choices: Choices) -> float:
    """Tokens emitted a target forward with a tree, the bonus included: the root, and every node's chance of being reached.

    Sequoia (Chen et al. 2024, arXiv 2402.12374), section 4.1: a child of rank r is accepted with probability
    ``acceptance[r]``, whatever came before (positional acceptance).

    Examples:
        >>> from specjax.planning import theory
        >>> round(theory.tree_tokens((0.6, 0.2), ((0,), (1,), (0, 0))), 2)  # 1 + 0.6 + 0.2 + 0.36
        2.16
    """
    _check_acceptance(acceptance)
    return 1 + math.fsum(math.prod(acceptance[rank] for rank in path) for path in choices)


def best_trees(acceptance: Sequence[float], nodes: int, depth: int) -> dict[tuple[int, int], Choices]:
    """For every number of nodes (root included) and depth the tree with the most `tree_tokens`: ``{(nodes, depth): choices}``.

    Sequoia's dynamic programming (Chen et al. 2024, arXiv 2402.12374, section 4.2): the best tree of n nodes gives its first
    child the best subtree of some size, its second child another, and so on, so that

        c(n, d, r) = max over m of c(n - m, d, r - 1) + p_r * max over k of c(m, d - 1, k)

    is what a root with at most r children and d levels below it is worth. O(nodes^2 * depth * ranks).

    Args:
        acceptance: chance that the child of each rank is accepted, by rank.
        nodes: the largest number to look at, 2 or more.
        depth: the largest depth, 1 or more.

    Examples:
        >>> from specjax.planning import theory
        >>> trees = theory.best_trees((0.6, 0.2), nodes=4, depth=2)
        >>> trees[4, 2]
        ((0,), (1,), (0, 0))
    """
    _check_acceptance(acceptance)
    if nodes < 2 or depth < 1:
        raise InputError(f"nodes={nodes}, depth={depth}: a tree has at least 2 nodes, the root included, and depth 1")
    ranks = len(acceptance)
    # worth[d, r, n]: as above, 0 for n = 0; given[d, r, n]: the m that child number r gets in it.
    worth = np.zeros((depth + 1, ranks + 1, nodes + 1))
    worth[:, :, 1:] = 1.0
    given = np.zeros((depth + 1, ranks + 1, nodes + 1), int)
    for d in range(1, depth + 1):
        subtree = worth[d - 1].max(axis=0)
        for r in range(1, ranks + 1):
            for n in range(1, nodes + 1):
                m = np.arange(n)  # the root itself keeps one node
                value = worth[d, r - 1, n - m] + acceptance[r - 1] * subtree[m]
                given[d, r, n] = int(np.argmax(value))
                worth[d, r, n] = value[given[d, r, n]]

    def children(n: int, d: int, r: int) -> list[tuple[int, ...]]:
        if n <= 1 or d == 0 or r == 0:
            return []
        m = int(given[d, r, n])
        below = [] if m == 0 else [(r - 1,)] + [(r - 1, *path) for path in grown(m, d - 1)]
        return children(n - m, d, r - 1) + below

    def grown(n: int, d: int) -> list[tuple[int, ...]]:
        return children(n, d, int(np.argmax(worth[d, :, n])))

    trees = {}
    for d in range(1, depth + 1):
        for n in range(2, nodes + 1):
            choices = tuple(sorted(grown(n, d), key=lambda path: (len(path), path)))
            if len(choices) == n - 1 and max(map(len, choices)) == d:
                trees[n, d] = choices
    return trees


def _check_acceptance(acceptance: Sequence[float]) -> None:
    if not acceptance or min(acceptance) < 0 or not math.fsum(acceptance) <= 1 + 1e-6:
        raise InputError(f"acceptance={tuple(acceptance)}: chances by rank, each at least 0, that add up to at most 1")
