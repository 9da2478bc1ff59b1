"""Compare generated tokens with the exact distribution of a tiny target, by G-tests.

The target's vocabulary is so small that every continuation can be enumerated. Users reach these functions as
``specjax.conformance.check_distribution`` and so on.
"""

import itertools
from collections.abc import Sequence

import jax
import numpy as np
from scipy import special

from specjax import decoding, sharding
from specjax.drafters.base import Drafter
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.sampling import Rule, Sampling, probabilities

SETTINGS = (Sampling(), Sampling(temperature=1.4, top_p=0.9))
"""What `check_distribution` samples with unless told otherwise."""


FALSE_ALARM = 1e-9
"""The chance that a right drafter or rule fails one G-test. The library's whole suite asks for less than a thousand p-values,
the thorough tests among them: a right library fails it with probability 1e-6."""


_LEAST_EXPECTED = 40
"""Draws of a cell. Of 2 to 60 cells with this many, exact draws fell below p = 1e-3, 1e-4 and 1e-5 as often as p says, within a
third; with 10 of them up to three times as often."""


def check_distribution(
    target: Target,
    drafter: Drafter,
    settings: Sequence[Sampling] = SETTINGS,
    *,
    rule: Rule = "independent",
    draws: int = 200_000,
    false_alarm: float = FALSE_ALARM,
) -> None:
    """Generated tokens have the target's own joint distribution, as far as ``draws`` of each setting can tell.

    A right drafter fails with probability ``false_alarm`` for each setting, over all random keys. The default rule judges drawn
    tokens by the drafter's own q, so that a wrong q shows. Coupled sampling never reads q: it would say nothing about the
    drafter.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax import conformance
        >>> tiny = specjax.Target.init(replace(config, vocab_size=3), jax.random.key(0))
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> conformance.check_distribution(tiny, drafter, draws=2_000)
    """
    for sampling, p_value in zip(settings, p_values(target, drafter, settings, rule=rule, draws=draws), strict=True):
        assert p_value >= false_alarm, (
            f"{sampling}: not the target's distribution: a G-test of {draws} draws gives p = {p_value:.1e}, and draws from the "
            f"target fall below {false_alarm:g} with that probability"
        )


def p_values(
    target: Target,
    drafter: Drafter | None,
    settings: Sequence[Sampling] = SETTINGS,
    *,
    rule: Rule = "independent",
    draws: int = 200_000,
    horizon: int = 3,
) -> list[float]:
    """For each setting, `g_test` of the next tokens, ``horizon`` of them, against the target's exact distribution.

    The settings are drawn with side by side, in the rows of the same batches.

    Raises:
        InputError: the target's vocabulary is too large to enumerate.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax import conformance
        >>> tiny = specjax.Target.init(replace(config, vocab_size=3), jax.random.key(0))
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> values = conformance.p_values(tiny, drafter, draws=2_000)
        >>> min(values) > 1e-9
        True
    """
    vocab, rows = target.config.vocab_size, min(50_000 // len(settings), draws) * len(settings)
    if vocab**horizon > 10_000:
        raise InputError(
            f"target has {vocab} tokens: {vocab}^{horizon} continuations are too many to enumerate; take a tiny one"
        )
    prompt = np.array([1, 3, 0, 1]) % vocab
    names = Sampling.__dataclass_fields__
    mixed = Sampling(**{name: np.resize([getattr(setting, name) for setting in settings], rows) for name in names})
    counts = np.zeros((len(settings), vocab**horizon))
    for i in range(-(-draws * len(settings) // rows)):
        result = decoding.generate(
            target,
            drafter,
            np.tile(prompt, (rows, 1)),
            max_new_tokens=horizon,
            sampling=mixed,
            key=jax.random.split(jax.random.key(i), rows),
            rule=rule,
        )
        joint = np.asarray(result.tokens)[:, len(prompt) :] @ (vocab ** np.arange(horizon)[::-1])
        for number in range(len(settings)):
            counts[number] += np.bincount(joint[number :: len(settings)], minlength=vocab**horizon)
    exact = [exact_joint(target, prompt, horizon, setting) for setting in settings]
    return [g_test(*pair) for pair in zip(counts, exact, strict=True)]


def exact_joint(target: Target, prompt: np.ndarray, horizon: int, sampling: Sampling) -> np.ndarray:
    """``[V ** horizon]`` the target's distribution of the tokens after ``prompt``, by running it on every continuation.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax import conformance
        >>> tiny = specjax.Target.init(replace(config, vocab_size=3), jax.random.key(0))
        >>> joint = conformance.exact_joint(
        ...     tiny, np.array([1, 0, 0, 1]), horizon=3, sampling=specjax.Sampling()
        ... )
        >>> joint.shape, round(joint.sum(), 6)
        ((27,), np.float64(1.0))
    """
    vocab = target.config.vocab_size
    continuations = np.array(list(itertools.product(range(vocab), repeat=horizon)))
    tokens = np.concatenate([np.tile(prompt, (len(continuations), 1)), continuations], axis=1)
    output, _ = jax.jit(Target.forward)(target, tokens)
    p = sharding.to_host(probabilities(output.logits, sampling.rows(len(continuations))), target.mesh).astype(np.float64)
    joint = np.ones(len(continuations))
    for i in range(horizon):
        joint *= p[np.arange(len(continuations)), len(prompt) - 1 + i, continuations[:, i]]
    return joint / joint.sum()


def g_test(counts: np.ndarray, exact: np.ndarray) -> float:
    """The p-value of ``counts`` of independent draws: how likely draws from ``exact`` are to be as far from it, or farther.

    The G-test: ``2 sum_i n_i log(n_i / (n p_i))`` is distributed as chi-square, with one degree of freedom less than there are
    cells (Wilks 1938). That takes cells that are hit often: those expected less than `_LEAST_EXPECTED` times count as one. A
    draw of probability 0 is no chance; it gives 0.

    Args:
        counts: ``[n]`` how often each outcome came.
        exact: ``[n]`` their probabilities.

    Examples:
        >>> from specjax import conformance
        >>> fair, biased = np.array([5020, 4980]), np.array([5300, 4700])
        >>> half = np.array([0.5, 0.5])
        >>> round(conformance.g_test(fair, half), 2)
        0.69
        >>> conformance.g_test(biased, half) < 1e-8
        True
    """
    if np.any(counts[exact == 0]):
        return 0.0
    expected = counts.sum() * exact / exact.sum()
    order = np.argsort(expected)
    # The first cells, as many as are expected too rarely, or more of them where that is too little still.
    enough = 1 + int(np.searchsorted(np.cumsum(expected[order]), _LEAST_EXPECTED))
    pool = min(max(enough, int(np.sum(expected < _LEAST_EXPECTED))), len(order))

    def pooled(values: np.ndarray) -> np.ndarray:
        return np.append(values[order[pool:]], values[order[:pool]].sum())

    found, hoped = pooled(counts), pooled(expected)
    g = max(0.0, 2 * special.xlogy(found, found / hoped).sum())  # rounding may leave it below 0
    return float(special.chdtrc(len(found) - 1, g)) if len(found) > 1 else 1.0
