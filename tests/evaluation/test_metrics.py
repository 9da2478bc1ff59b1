import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.stats import Stats, StepInfo
from specjax.drafts.draft import Draft
from specjax.evaluation import metrics

P = jnp.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
Q = jnp.array([[0.25, 0.25, 0.5], [0.2, 0.3, 0.5]])


def test_overlap_by_hand() -> None:
    np.testing.assert_allclose(metrics.overlap(P, Q), [0.5, 1.0], atol=1e-6)


def test_overlap_is_what_total_variation_leaves() -> None:
    """Check beta = 1 - (1/2) sum |p - q|."""
    p, q = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(9), (2, 50)), jnp.float32)
    np.testing.assert_allclose(
        metrics.overlap(p, q), 1 - 0.5 * jnp.sum(jnp.abs(p - q), axis=-1), atol=1e-6
    )


def test_summary_by_hand() -> None:
    """Summarise two rows with drafts of two tokens.

    Row 0 emits 3 tokens, then 1. Row 1 drafts one token and emits 2, and is done.
    """
    # Without parts, statistics do not read the tokens.
    draft = Draft.chain(jnp.zeros(2, jnp.int32), jnp.zeros((2, 2), jnp.int32))
    unobserved = {"draft": draft, "path": None}
    stats = Stats.zeros(2, 2)
    stats = stats.add(
        StepInfo(
            active=jnp.array([True, True]),
            emitted=jnp.array([3, 2]),
            accepted=jnp.array([2, 1]),
            drafted=jnp.array([2, 1]),
            drafted_at=jnp.array([[True, True], [True, False]]),
            scored=jnp.array([3, 3]),
            **unobserved,
        )
    )
    stats = stats.add(
        StepInfo(
            active=jnp.array([True, False]),
            emitted=jnp.array([1, 0]),
            accepted=jnp.array([0, 0]),
            drafted=jnp.array([2, 0]),
            drafted_at=jnp.array([[True, True], [False, False]]),
            scored=jnp.array([3, 0]),
            **unobserved,
        )
    )
    first, second = metrics.summarise(stats, 0), metrics.summarise(stats, 1)
    both = metrics.summarise(stats)
    assert (first.steps, first.emitted, first.scored) == (2, 4, 6)
    assert (first.drafted, first.accepted) == (4, 2)
    assert (first.acceptance_length, first.acceptance_rate) == (2.0, 0.5)
    assert (first.by_position, first.histogram) == ((0.5, 0.5), (0, 1, 0, 1))
    assert (second.by_position, second.histogram) == ((1.0, None), (0, 0, 1, 0))
    assert (both.drafted_at, both.accepted_at) == ((3, 2), (2, 1))
    assert both.acceptance_length == pytest.approx(6 / 3)
    assert both.acceptance_rate == pytest.approx(3 / 5)
