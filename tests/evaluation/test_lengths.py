"""Compute acceptance lengths from the counts of steps, in each of the three ways."""

import numpy as np
import pytest

from specjax.evaluation.lengths import StepCounts, mean_length


def test_lengths_agree_with_a_list_of_steps() -> None:
    """Compare with sums over single steps: their emitted tokens, and whether they had a draft."""
    rng = np.random.default_rng(0)
    answers, lists = [], []
    for question in (0, 0, 1, 2, 2, 2):
        has_draft = rng.random(rng.integers(1, 12)) < 0.7
        accepted = rng.integers(0, 5, has_draft.shape) * has_draft
        lists.append((question, accepted, has_draft))
        counts = StepCounts(
            int(accepted.sum() + accepted.size),
            accepted.size,
            int(has_draft.sum()),
            int(accepted.sum()),
        )
        answers.append((question, counts))
    steps = np.concatenate([accepted for _, accepted, _ in lists]) + 1
    assert mean_length(answers, "passes", "pooled") == pytest.approx(steps.mean())
    of_requests = np.mean([np.mean(accepted + 1) for _, accepted, _ in lists])
    assert mean_length(answers, "passes", "of_requests") == pytest.approx(of_requests)
    of_conversations = np.mean(
        [
            np.mean(np.concatenate([accepted for q, accepted, _ in lists if q == question]) + 1)
            for question in range(3)
        ]
    )
    assert mean_length(answers, "passes", "of_conversations") == pytest.approx(of_conversations)
    drafted = np.concatenate([accepted[has_draft] for _, accepted, has_draft in lists]) + 1
    assert mean_length(answers, "drafts", "pooled") == pytest.approx(drafted.mean())
    assert len({round(value, 6) for value in (steps.mean(), of_requests, drafted.mean())}) == 3


def test_what_was_not_counted_has_no_length() -> None:
    counts = StepCounts(10, None, 4, 6)
    assert not counts.has("passes")
    assert counts.length("passes") is None
    assert counts.length("drafts") == 2.5
    assert not StepCounts(10, 4, 4, None).has("drafts")
    assert StepCounts(10, 4, 4, None).length("drafts") is None
    total = counts + StepCounts(1, 2, 3, 4)
    assert total == StepCounts(11, None, 7, 10)
    assert mean_length([(0, StepCounts(0, 0, 0, 0))], "passes", "pooled") is None


def test_without_drafts_the_length_is_one() -> None:
    assert StepCounts(5, 5, 0, 0).length("drafts") == StepCounts(5, 5, 0, 0).length("passes") == 1
