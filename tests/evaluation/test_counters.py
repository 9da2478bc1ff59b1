"""Read the counters of texts that vLLM's and SGLang's names are written with."""

from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from specjax.errors import InputError
from specjax.evaluation.counters import Counters, read_counters
from tests.evaluation.stub_server import MadeUpAnswer, SGLangMetrics, VLLMMetrics

ANSWERS = [MadeUpAnswer("a", 9, (3, 0, 2)), MadeUpAnswer("b", 4, (1, 1))]


def counters_of(metrics) -> Counters:
    return read_counters(generate_latest(metrics.registry).decode())


def test_vllm_counters_are_summed_over_engines() -> None:
    metrics = VLLMMetrics(3)
    assert counters_of(metrics) == Counters("vllm", 0, 0, 0, 0, (0, 0, 0), None)
    for answer in ANSWERS:
        metrics.count(answer)
    counters = counters_of(metrics)
    assert counters == Counters("vllm", 13, 5, 15, 7, (4, 2, 1), None)
    assert counters.steps.length("drafts") == 1 + 7 / 5
    assert counters.steps.length("passes") is None
    assert counters.draft_length == 3


def test_sglang_counters() -> None:
    metrics = SGLangMetrics(4)
    metrics.count(ANSWERS[0])
    counters = counters_of(metrics)
    assert counters == Counters("sglang", 9, 3, None, None, (), 4)
    assert counters.steps.length("passes") == 3
    assert counters.steps.length("drafts") is None
    assert counters.draft_length == 4


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (SGLangMetrics(4, has_counter=False), "use a newer SGLang"),
        # Before its first request SGLang has no counter yet.
        (SGLangMetrics(4), "start it with a drafter"),
    ],
)
def test_without_counters_the_error_says_what_to_do(metrics, words) -> None:
    with pytest.raises(InputError, match=words):
        counters_of(metrics)


@pytest.mark.parametrize("text", ["<html></html>", "{}", 'a{b="c" 1'])
def test_other_texts_are_refused(text) -> None:
    with pytest.raises(InputError, match=r"/metrics (is not text|has neither)"):
        read_counters(text)


def test_growth_is_refused_if_a_counter_went_back() -> None:
    later = Counters("vllm", 13, 5, 15, 7, (4, 2, 1), None)
    earlier = replace(later, generated=4, drafts=2, drafted=6, accepted=2, accepted_at=(2,))
    assert later.since(earlier) == Counters("vllm", 9, 3, 9, 5, (2, 2, 1), None)
    assert earlier.plus(later.since(earlier)) == later
    with pytest.raises(InputError, match="went back"):
        earlier.since(later)
    with pytest.raises(InputError, match="went back"):
        later.since(replace(earlier, accepted_at=(5,)))


@pytest.mark.parametrize(("drafted", "length"), [(60, 3), (57, 3), (50, None), (0, None)])
def test_a_draft_length_is_that_of_nearly_all_drafts(drafted, length) -> None:
    drafts = 20 if drafted else 0
    assert Counters("vllm", 99, drafts, drafted, 0, (0,) * 16, None).draft_length == length


@pytest.mark.parametrize(
    ("drafts", "drafted", "shares"),
    [
        (10, 30, [0.9, 0.4, 0.0]),  # chains of 3
        (10, 26, [0.9, 0.4]),  # of several lengths
        (0, 0, []),
    ],
)
def test_positions_that_no_draft_reached_are_left_out(drafts, drafted, shares) -> None:
    accepted_at = (9, 4, 0, 0, 0) if drafts else (0, 0, 0, 0, 0)
    counters = Counters("vllm", 30, drafts, drafted, sum(accepted_at), accepted_at, None)
    assert counters.by_position() == shares
