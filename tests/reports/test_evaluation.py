"""Summarize the answers of an evaluation, with counts of steps that are given."""

import numpy as np
import pytest

from specjax.decoding.stats import Stats
from specjax.evaluation.protocols import PROTOCOLS
from specjax.reports import evaluation
from specjax.reports.evaluation import OVERALL, PLAIN, MethodAnswer


def stats_of(accepted: list[int | None], depth: int = 3) -> Stats:
    """Return the statistics of one row; None is a step without a draft."""
    drafted = [depth if count is not None else 0 for count in accepted]
    counts = [count or 0 for count in accepted]
    levels = range(depth)
    return Stats(
        steps=np.array([len(accepted)]),
        drafted=np.array([sum(drafted)]),
        accepted=np.array([sum(counts)]),
        scored=np.array([len(accepted) * (depth + 1)]),
        drafted_at=np.array([[sum(width > level for width in drafted) for level in levels]]),
        accepted_at=np.array([[sum(count > level for count in counts) for level in levels]]),
        histogram=np.array([[sum(count + 1 == size for count in counts) for size in range(5)]]),
        **dict.fromkeys(("drafted_by", "accepted_by", "accepted_only_by"), np.zeros((1, 0), int)),
    )


STEPS = [(0, "coding", [3, None, 2]), (0, "coding", [1, 1]), (1, "rag", [3, 3, 3, 0])]
ANSWERS = [
    MethodAnswer(question, category, name, (1.0,), stats_of(steps))
    for question, category, accepted in STEPS
    for name, steps in (
        (PLAIN, [None] * sum((count or 0) + 1 for count in accepted)),
        ("a", accepted),
    )
]


def test_every_mean() -> None:
    figures = evaluation.summarise(ANSWERS, [PLAIN, "a"], PROTOCOLS["speed-bench"])[OVERALL]["a"]
    assert figures["acceptance_length_pooled"] == pytest.approx(25 / 9)
    assert figures["acceptance_length_of_requests"] == pytest.approx((8 / 3 + 2 + 13 / 4) / 3)
    conversations = (12 / 5 + 13 / 4) / 2
    assert figures["acceptance_length_of_conversations"] == pytest.approx(conversations)
    assert figures["acceptance_length_by_protocol"] == pytest.approx(conversations)
    assert figures["acceptance_length_of_drafts"] == pytest.approx(1 + 16 / 8)


@pytest.mark.parametrize(("name", "length"), [("spec-bench", 25 / 9), ("vllm-80", 1 + 16 / 8)])
def test_the_figure_of_a_protocol(name, length) -> None:
    results = evaluation.summarise(ANSWERS, [PLAIN, "a"], PROTOCOLS[name])
    assert results[OVERALL]["a"]["acceptance_length_by_protocol"] == pytest.approx(length)
    assert results[OVERALL][PLAIN]["acceptance_length_by_protocol"] == 1
    text = evaluation.markdown(results, ["one\ntwo"])
    assert f"| {length:.2f} |" in text
    assert text.endswith("\n\none\ntwo\n")


def test_without_a_protocol_there_is_no_such_column() -> None:
    results = evaluation.summarise(ANSWERS, [PLAIN, "a"])
    assert "acceptance_length_by_protocol" not in results[OVERALL]["a"]
    assert "by protocol" not in evaluation.markdown(results, [])
    assert "| coding | plain |" in evaluation.markdown(results, [])
