"""Test the random parts of the rules against exact outcomes, to within a fiftieth.

Each test counts the joint outcome of one decision: which tokens were drafted, how many of them were
accepted, and which token came next. A second model of the rule, by enumeration in float64, says how
likely each outcome is, and how likely it would be if one quantity were multiplied by 0.98 or 1.02.
A test fails if it would notice one of these wrong rules too seldom. The distributions come from a
random search for those that need few draws.

tests/decoding/test_verification.py checks what whole drafts lead to, with many drafters and
settings. It takes fewer draws of each, and notices only larger mistakes.
"""

from functools import partial
from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.verification import verify
from specjax.drafters import candidates
from specjax.drafts.draft import Draft, Verdict
from specjax.sampling import RowSampling, Sampling, position_keys, position_noise, split_keys
from tests.decoding import power

Factors = dict[str, float]
"""The factors of quantities of a rule that are not multiplied by 1."""


def draws_of(probabilities: np.ndarray, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Return ``[rows]`` independent draws, as the numbers of the outcomes."""
    return rng.choice(len(probabilities), size=rows, p=probabilities / probabilities.sum())


def softmax(logits: np.ndarray) -> np.ndarray:
    mass = np.exp(logits - logits.max())
    return mass / mass.sum()


def count_outcomes(outcome: tuple[np.ndarray, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Return a flat array of how often each outcome came.

    An outcome is an index along each axis of ``shape``.
    """
    return np.bincount(np.ravel_multi_index(outcome, shape), minlength=int(np.prod(shape)))


def normalised(mass: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    return mass / mass.sum() if mass.sum() > 0 else otherwise


# --- chains ---------------------------------------------------------------------------------------

CHAIN_QUANTITIES = {
    "rejection": ("number", "p judged", "q judged", "p residual", "q residual"),
    "block": (
        "number",
        "p judged",
        "q judged",
        "p excess",
        "q excess",
        "p residual",
        "q residual",
        "h",
    ),
}


def chain_outcomes(rule: str, p: np.ndarray, q: np.ndarray, factors: Factors) -> np.ndarray:
    """Return the probability ``[gamma + 1, V ** gamma, V]`` of each outcome of a chain.

    The axes are the number of accepted tokens, the drafted tokens, and the next token.

    Args:
        rule: one of `CHAIN_QUANTITIES`.
        p: ``[gamma + 1, V]`` the target's distribution at each depth.
        q: ``[gamma, V]`` the drafter's.
        factors: the factors of the rule's quantities.
    """

    def factor(name: str) -> float:
        return factors.get(name, 1.0)

    gamma, vocab = q.shape
    outcomes = np.zeros((gamma + 1, vocab**gamma, vocab))
    q_with_end = np.append(q, np.zeros((1, vocab)), axis=0)
    for number, x in enumerate(product(range(vocab), repeat=gamma)):
        drafted = np.prod(q[range(gamma), x])
        judged = [
            factor("p judged") * p[i, x[i]] / (factor("q judged") * q[i, x[i]])
            for i in range(gamma)
        ]
        if rule == "rejection":
            passes = [min(1.0, ratio / factor("number")) for ratio in judged]
            reached = np.cumprod([1.0, *passes])
            chances, ratios = reached - np.append(reached[1:], 0.0), np.ones(gamma + 1)
        else:
            ratios = np.ones(gamma + 1)
            for i in range(gamma):
                ratios[i + 1] = min(1.0, ratios[i] * judged[i])
            chances, none_longer = np.zeros(gamma + 1), 1.0
            for i in range(gamma, 0, -1):
                excess = np.maximum(
                    0.0, factor("p excess") * ratios[i] * p[i] - factor("q excess") * q_with_end[i]
                ).sum()
                h = factor("h") * excess / max(excess + 1 - ratios[i], 1e-30)
                chances[i] = none_longer * min(1.0, h / factor("number"))
                none_longer -= chances[i]
            chances[0] = none_longer
        for count, chance in enumerate(chances):
            residual = np.maximum(
                0.0,
                factor("p residual") * ratios[count] * p[count]
                - factor("q residual") * q_with_end[count],
            )
            outcomes[count, number] += drafted * chance * normalised(residual, p[count])
    return outcomes


CHAINS = {
    "rejection": (
        [[0.1, 0.84, 0.06], [0.21, 0.18, 0.61], [0.54, 0.29, 0.17]],
        [[0.05, 0.85, 0.1], [0.23, 0.17, 0.6]],
        60_000,
    ),
    "block": (
        [[0.53, 0.2, 0.27], [0.36, 0.19, 0.45], [0.09, 0.28, 0.63]],
        [[0.54, 0.18, 0.28], [0.35, 0.21, 0.44]],
        100_000,
    ),
}
"""The target's and the drafter's distributions at each depth, and the number of chains, by rule."""


def every_row(values: np.ndarray, rows: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(values, jnp.float32), (rows, *np.shape(values)))


@jax.jit
def verified(draft: Draft, p: jax.Array, settings: RowSampling, keys: jax.Array) -> Verdict:
    return verify(draft, jnp.log(p), settings, keys)


@pytest.mark.parametrize("rule", CHAINS)
def test_a_chain_has_the_outcomes_that_the_paper_says(rule: str) -> None:
    p, q, rows = np.array(CHAINS[rule][0]), np.array(CHAINS[rule][1]), CHAINS[rule][2]
    gamma, vocab = q.shape
    rng = np.random.default_rng(0)
    x = np.stack([draws_of(of_depth, rows, rng) for of_depth in q], axis=1)
    draft = Draft.chain(jnp.zeros(rows, jnp.int32), jnp.asarray(x, jnp.int32), every_row(q, rows))
    keys = jax.random.split(jax.random.key(0), rows)
    verdict = verified(draft, every_row(p, rows), Sampling().rows(rows, rule), keys)
    outcome = (
        np.asarray(verdict.count) - 1,
        x @ vocab ** np.arange(gamma)[::-1],
        np.asarray(verdict.token),
    )
    counts = count_outcomes(outcome, (gamma + 1, vocab**gamma, vocab))
    alternatives = power.scaled(CHAIN_QUANTITIES[rule])
    outcomes = {
        name: chain_outcomes(rule, p, q, factors).reshape(-1)
        for name, factors in alternatives.items()
    }
    power.check(counts, chain_outcomes(rule, p, q, {}).reshape(-1), outcomes)


# --- siblings -------------------------------------------------------------------------------------

SIBLING_QUANTITIES = ("number", "p judged", "q judged", "p residual", "q residual", "rest")


def sibling_outcomes(p: np.ndarray, q: np.ndarray, count: int, factors: Factors) -> np.ndarray:
    """Return the probability ``[count + 1, n, V]`` of each outcome of siblings.

    The axes are the accepted child, or ``count`` for none, the drafted siblings, and the next
    token.

    Args:
        p: ``[V]`` the target's distribution.
        q: ``[V]`` the drafter's; the siblings are the ``n`` permutations of ``count`` tokens.
        count: number of siblings.
        factors: the factors of `SIBLING_QUANTITIES`.
    """

    def factor(name: str) -> float:
        return factors.get(name, 1.0)

    siblings = list(permutations(range(len(p)), count))
    outcomes = np.zeros((count + 1, len(siblings), len(p)))
    for number, x in enumerate(siblings):
        drawn_from, drafted = q, 1.0
        residual_p, assumed_q, waiting = p, q, 1.0
        for child, token in enumerate(x):
            drafted *= drawn_from[token]
            drawn_from = normalised(
                np.where(np.arange(len(p)) == token, 0.0, drawn_from), drawn_from
            )
            bound = max(factor("number") * factor("q judged") * assumed_q[token], 1e-30)
            accept = min(1.0, factor("p judged") * residual_p[token] / bound)
            outcomes[child, number, token] = waiting * accept
            waiting *= 1 - accept
            residual = np.maximum(
                0.0, factor("p residual") * residual_p - factor("q residual") * assumed_q
            )
            residual_p = normalised(residual, residual_p)
            rest = np.where(np.arange(len(p)) == token, 0.0, assumed_q)
            assumed_q = factor("rest") * normalised(rest, rest)
        outcomes[count, number] = waiting * residual_p
        outcomes[:, number] *= drafted
    return outcomes


SIBLINGS = ([0.04, 0.43, 0.53], [0.78, 0.1, 0.12], 60_000)
"""The distributions of target and drafter, and how many rows of two siblings are drawn."""


def test_drawn_siblings_have_the_outcomes_that_the_papers_say() -> None:
    """Check drafting and verifying: siblings are the largest logits with Gumbel noise."""
    p, q, rows, count = np.array(SIBLINGS[0]), np.array(SIBLINGS[1]), SIBLINGS[2], 2
    vocab, settings = len(p), Sampling().rows(rows)
    draft_keys, verify_keys = split_keys(jax.random.split(jax.random.key(0), rows), 2)
    tokens = children(jnp.log(every_row(q[None], rows)), count, settings, draft_keys)[0]
    x = np.asarray(tokens)[:, 0]
    draft = Draft.of_tree(
        jnp.asarray(np.pad(x, ((0, 0), (1, 0))), jnp.int32),
        np.array([-1] + [0] * count),
        q=every_row(np.tile(q, (count + 1, 1)), rows),
    )
    verdict = verified(draft, every_row(np.tile(p, (count + 1, 1)), rows), settings, verify_keys)
    accepted = np.where(np.asarray(verdict.count) > 1, np.asarray(verdict.path)[:, 1] - 1, count)
    token = np.where(
        accepted < count,
        np.take_along_axis(x, np.minimum(accepted, count - 1)[:, None], axis=1)[:, 0],
        verdict.token,
    )
    number = {siblings: i for i, siblings in enumerate(permutations(range(vocab), count))}
    outcome = (accepted, np.array([number[tuple(siblings)] for siblings in x.tolist()]), token)
    counts = count_outcomes(outcome, (count + 1, len(number), vocab))
    alternatives = power.scaled(SIBLING_QUANTITIES)
    outcomes = {
        name: sibling_outcomes(p, q, count, factors).reshape(-1)
        for name, factors in alternatives.items()
    }
    power.check(counts, sibling_outcomes(p, q, count, {}).reshape(-1), outcomes)


@partial(jax.jit, static_argnames="count")
def children(logits: jax.Array, count: int, settings: RowSampling, keys: jax.Array):
    return candidates._children(logits, count, settings, keys)


# --- noise ----------------------------------------------------------------------------------------

LEVELS = np.log([0.5, *[0.5 / 15] * 15])
"""Logits of one likely token and fifteen equal ones.

How often the first token comes depends strongly on the size of the noise.
"""


def test_coupled_tokens_are_drawn_with_noise_of_the_right_size() -> None:
    """Check the size of the noise: scaling it is like dividing the logits by the same number."""
    rows = 120_000
    keys = jax.random.split(jax.random.key(0), rows)
    settings = Sampling().rows(rows, "coupled")
    draft = Draft.chain(jnp.zeros(rows, jnp.int32), jnp.zeros((rows, 0), jnp.int32))
    verdict = verified(draft, every_row(np.exp(LEVELS)[None], rows), settings, keys[None])
    # The fifteen are counted together: a statistic of fewer cells notices more.
    likely = np.bincount(np.asarray(verdict.token) == 0, minlength=2)[::-1]

    def outcomes(factor: float) -> np.ndarray:
        p = softmax(LEVELS / factor)
        return np.array([p[0], 1 - p[0]])

    power.check(
        likely, outcomes(1.0), {f"noise * {factor}": outcomes(factor) for factor in power.FACTORS}
    )


def test_two_siblings_are_drawn_without_replacement_with_noise_of_the_right_size() -> None:
    """Check that the tokens follow the q that the draft states."""
    rows, q = 120_000, softmax(LEVELS)
    settings, keys = Sampling().rows(rows), jax.random.split(jax.random.key(1), rows)
    tokens, _, stated_q = children(every_row(LEVELS[None], rows), 2, settings, keys)
    np.testing.assert_allclose(stated_q[0, 0], q, rtol=1e-5)
    is_likely = np.asarray(tokens)[:, 0] == 0
    counts = np.array([is_likely[:, 0].sum(), is_likely[:, 1].sum(), rows - is_likely.sum()])

    def outcomes(factor: float) -> np.ndarray:
        p = softmax(LEVELS / factor)
        second = np.sum(p[1:] * p[0] / (1 - p[1:]))
        return np.array([p[0], second, 1 - p[0] - second])

    power.check(
        counts, outcomes(1.0), {f"noise * {factor}": outcomes(factor) for factor in power.FACTORS}
    )


def test_noise_has_the_gumbel_distribution_in_a_thousand_parts() -> None:
    """Check the noise of all positions and tokens together.

    Each part has the same probability. Noise of another size or location would differ.
    """
    parts, positions, vocab = 1_000, 100, 10_000
    row_keys = jax.random.split(jax.random.key(0), 1)
    keys = position_keys(row_keys, jnp.arange(positions)[:, None])[:, 0]
    draw_noise = jax.jit(position_noise, static_argnames="vocab")
    noise = np.asarray(draw_noise(keys, vocab=vocab), np.float64)
    bounds = -np.log(-np.log(np.arange(1, parts) / parts))

    def outcomes(factor: float = 1.0, shift: float = 0.0) -> np.ndarray:
        below = np.exp(-np.exp(-(bounds - shift) / factor))
        return np.diff(np.concatenate([[0.0], below, [1.0]]))

    counts = np.bincount(np.searchsorted(bounds, noise.reshape(-1)), minlength=parts)
    wrong = {f"noise * {factor}": outcomes(factor) for factor in power.FACTORS}
    power.check(
        counts,
        outcomes(),
        wrong | {f"noise + {shift}": outcomes(shift=shift) for shift in (-0.05, 0.05)},
    )
