"""G-tests of generated tokens against the exact distribution of a tiny target.

The target's vocabulary is so small that every continuation can be enumerated. Users call these
functions as ``specjax.conformance.check_distribution`` and so on.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from scipy import special

from specjax import decoding, sharding
from specjax.adjustments import Adjustments
from specjax.drafters.base import Drafter
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.sampling import Rule, Sampling, before_temperature, probabilities

SETTINGS = (Sampling(), Sampling(temperature=1.4, top_p=0.9))
"""The default sampling parameters of `check_distribution`."""


FALSE_ALARM = 1e-9
"""The probability that a correct drafter or rule fails one G-test.

The whole test suite, with the thorough tests, computes less than a thousand p-values. So a correct
library fails it with probability 1e-6.
"""


_LEAST_EXPECTED = 40
"""The minimum expected number of draws of a cell.

With this many, for 2 to 60 cells, exact draws fell below p = 1e-3, 1e-4 and 1e-5 as often as they
should, within a third; with 10, up to three times as often.
"""


def check_distribution(
    target: Target,
    drafter: Drafter,
    settings: Sequence[Sampling] = SETTINGS,
    *,
    rule: Rule = "independent",
    draws: int = 200_000,
    false_alarm: float = FALSE_ALARM,
) -> None:
    """Check that generated tokens have the target's joint distribution.

    Over all random keys, a correct drafter fails with probability ``false_alarm`` for each setting.
    The default rule verifies sampled tokens by the drafter's q, so a wrong q makes the check fail.
    Coupled sampling never reads q, so it cannot test the drafter.

    Args:
        target: a target with a tiny vocabulary.
        drafter: the drafter.
        settings: the sampling parameters to test.
        rule: the verification rule.
        draws: the number of texts for each setting.
        false_alarm: the probability with which a correct drafter fails.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax import conformance
        >>> tiny = specjax.Target.init(replace(config, vocab_size=3), jax.random.key(0))
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> conformance.check_distribution(tiny, drafter, draws=2_000)
    """
    for sampling, p_value in zip(
        settings, p_values(target, drafter, settings, rule=rule, draws=draws), strict=True
    ):
        assert p_value >= false_alarm, (
            f"{sampling}: this is not the target's distribution: a G-test of {draws} draws gives p"
            f" = {p_value:.1e}; draws from the target fall below {false_alarm:g} with that"
            " probability"
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
    """Return for each setting the p-value of a `g_test` against the target's exact distribution.

    All settings are sampled in the same batches, in different rows.

    Args:
        target: a target with a tiny vocabulary.
        drafter: the drafter; None for plain decoding.
        settings: the sampling parameters to test.
        rule: the verification rule.
        draws: the number of texts for each setting.
        horizon: the number of tokens of each text.

    Raises:
        InputError: The target's vocabulary is too large to enumerate all texts.

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
            f"target has {vocab} tokens: {vocab}^{horizon} continuations are too many to enumerate;"
            " give a tiny target"
        )
    prompt = np.array([1, 3, 0, 1]) % vocab
    names = Sampling.__dataclass_fields__
    mixed = Sampling(
        **{
            name: np.resize([getattr(setting, name) for setting in settings], rows)
            for name in names
        }
    )
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
        for index in range(len(settings)):
            counts[index] += np.bincount(joint[index :: len(settings)], minlength=vocab**horizon)
    exact = [exact_joint(target, prompt, horizon, setting) for setting in settings]
    return [g_test(*pair) for pair in zip(counts, exact, strict=True)]


def exact_joint(target: Target, prompt: np.ndarray, horizon: int, sampling: Sampling) -> np.ndarray:
    """Return the target's distribution ``[V ** horizon]`` of all continuations of a prompt.

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
    count = len(continuations)
    tokens = np.concatenate([np.tile(prompt, (count, 1)), continuations], axis=1)
    output, _ = jax.jit(Target.forward)(target, tokens)
    rows = sampling.rows(count)
    joint = np.ones(count)
    for position in range(len(prompt), len(prompt) + horizon):
        logits = output.logits[:, position - 1]
        if sampling.has_penalties:
            texts = tokens[:, :position].tolist()
            adjustments = Adjustments.of_texts(texts, [len(prompt)] * count, vocab)
            rows = replace(rows, adjustments=adjustments)
        p = probabilities(before_temperature(logits, rows, depth=0), rows)
        p = sharding.to_host(p, target.mesh).astype(np.float64)
        joint *= p[np.arange(count), tokens[:, position]]
    return joint / joint.sum()


def g_test(counts: np.ndarray, exact: np.ndarray) -> float:
    """Return the p-value of a G-test of independent draws.

    It is the probability that draws from the distribution ``exact`` deviate from it as much as
    ``counts``, or more. ``2 sum_i n_i log(n_i / (n p_i))`` has a chi-square distribution, with one
    degree of freedom less than there are cells (Wilks 1938). This requires cells that are hit
    often, so all cells that are expected less than `_LEAST_EXPECTED` times are pooled. If an
    outcome of probability 0 was drawn, the p-value is 0.

    Args:
        counts: ``[n]`` how often each outcome was drawn.
        exact: ``[n]`` the probability of each outcome.

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
    # Pool all cells that are expected too rarely, and more of them until the pool is large enough.
    enough = 1 + int(np.searchsorted(np.cumsum(expected[order]), _LEAST_EXPECTED))
    pool = min(max(enough, int(np.sum(expected < _LEAST_EXPECTED))), len(order))

    def pooled(values: np.ndarray) -> np.ndarray:
        return np.append(values[order[pool:]], values[order[:pool]].sum())

    observed, expected = pooled(counts), pooled(expected)
    # Rounding may make it negative, and a statistic of less than 0 has no p-value.
    g = max(0.0, 2 * special.xlogy(observed, observed / expected).sum())
    return float(special.chdtrc(len(observed) - 1, g)) if len(observed) > 1 else 1.0
