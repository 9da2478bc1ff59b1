"""Check the settings of the public protocols, and that a run's differences are stated."""

import pytest

from specjax.errors import InputError
from specjax.evaluation.lengths import StepCounts
from specjax.evaluation.protocols import PROTOCOLS, differences
from specjax.evaluation.questions import Question

QUESTIONS = [
    Question("mt-bench", ("One?", "Two?")),
    Question("translation", ("Three?",)),
    Question("mt-bench", ("Four?", "Five?")),
]

SAME = {
    name: {
        "questions": protocol.questions,
        "max_new_tokens": protocol.max_new_tokens,
        "sampling": {"temperature": 0.0},
        "has_template": True,
        "measure": protocol.measure,
        "drafts": {"a": protocol.draft} if protocol.draft else {"a": "anything"},
    }
    for name, protocol in PROTOCOLS.items()
}


@pytest.mark.parametrize(
    ("name", "tokens", "mean", "measure", "turns"),
    [
        ("speed-bench", 4096, "of_conversations", "passes", 5),
        ("spec-bench", 1024, "pooled", "passes", 5),
        ("vllm-80", 256, "pooled", "drafts", 2),
    ],
)
def test_settings(name, tokens, mean, measure, turns) -> None:
    protocol = PROTOCOLS[name]
    assert (protocol.max_new_tokens, protocol.mean, protocol.measure) == (tokens, mean, measure)
    assert sum(len(question.turns) for question in protocol.select(QUESTIONS)) == turns
    assert differences(protocol, **SAME[name]) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"questions": 3}, "3 questions instead of 80"),
        ({"max_new_tokens": 64}, "max_new_tokens 64 instead of 256"),
        ({"sampling": {"temperature": 0.7}}, "temperature 0.7 instead of 0"),
        (
            {"sampling": {"temperature": 0.0, "top_p": 0.9}},
            "top_p 0.9, which the protocol does not have",
        ),
        ({"has_template": False}, "no chat template"),
        ({"thinking": "on"}, "thinking on, which the protocol does not set"),
        (
            {"measure": "passes"},
            "length as emitted tokens / passes of the target instead of 1 + accepted tokens /"
            " passes with a draft, which was not counted",
        ),
        ({"drafts": {"a": "chain of 5"}}, "a drafts chain of 5 instead of chain of 3"),
    ],
)
def test_a_difference_is_stated(change, text) -> None:
    assert differences(PROTOCOLS["vllm-80"], **SAME["vllm-80"] | change) == [text]


def test_speed_bench_may_think() -> None:
    assert differences(PROTOCOLS["speed-bench"], **SAME["speed-bench"], thinking="on") == []


def test_a_file_without_the_protocols_questions_is_refused() -> None:
    with pytest.raises(InputError, match=r"vllm-80.*no question of mt-bench"):
        PROTOCOLS["vllm-80"].select(QUESTIONS[1:2])


def test_the_other_measure_is_used_if_only_that_was_counted() -> None:
    assert PROTOCOLS["vllm-80"].measure_for(StepCounts(9, 3, 3, None)) == "passes"
    assert PROTOCOLS["spec-bench"].measure_for(StepCounts(9, None, 3, 6)) == "drafts"
    assert PROTOCOLS["spec-bench"].measure_for(StepCounts(9, 3, 3, 6)) == "passes"
