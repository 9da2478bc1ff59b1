"""Measure servers that count as vLLM, as SGLang and as ours."""

import pytest

from specjax.errors import InputError
from specjax.evaluation import served
from specjax.evaluation.questions import Question
from specjax.evaluation.served import MeasuredServer, ask, total_growth
from tests.evaluation.stub_server import (
    NAME,
    MadeUpAnswer,
    SGLangMetrics,
    VLLMMetrics,
    stub_server,
)
from tests.serving.http.made_up import MadeUpEngine, serving

QUESTIONS = [Question("coding", ("Sort.", "Faster.")), Question("rag", ("Who?",))]
ANSWERS = [
    MadeUpAnswer("sorted", 9, (3, 0, 2)),
    MadeUpAnswer("faster", 4, (1, 1)),
    MadeUpAnswer("somebody", 12, (3, 3, 3)),
]
FIELDS = {"max_tokens": 32, "temperature": 0.0}


@pytest.fixture(autouse=True)
def _direct(monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(served, "_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(served, "SETTLE_SECONDS", 0.3)


@pytest.mark.parametrize("metrics", [VLLMMetrics(3), SGLangMetrics(3)])
def test_the_growth_of_each_answer_is_its_own(metrics) -> None:
    with stub_server(metrics, ANSWERS) as stub:
        metrics.count(MadeUpAnswer("earlier", 1000, (0,) * 999))  # earlier traffic does not count
        answers = ask(MeasuredServer(stub.url + "/v1"), QUESTIONS, FIELDS)
    assert [(answer.question, answer.category) for answer in answers] == [
        (0, "coding"),
        (0, "coding"),
        (1, "rag"),
    ]
    assert [answer.tokens for answer in answers] == [9, 4, 12]
    assert [answer.growth.drafts for answer in answers] == [3, 2, 3]
    assert sum(answer.tokens_of_strangers for answer in answers) == 0
    total = total_growth(answers).steps
    if isinstance(metrics, VLLMMetrics):
        assert [answer.growth.accepted for answer in answers] == [5, 2, 9]
        assert total.length("drafts") == 1 + 16 / 8
        assert total_growth(answers).accepted_at == (7, 5, 4)
    else:
        assert total.length("passes") == 25 / 8


def test_each_turn_follows_the_servers_answer_to_the_one_before() -> None:
    with stub_server(VLLMMetrics(3), ANSWERS) as stub:
        ask(MeasuredServer(stub.url, api_key="secret"), QUESTIONS, FIELDS)
    assert stub.requests[0]["max_tokens"] < FIELDS["max_tokens"]  # the warm-up
    assert stub.requests[1] == {
        "model": NAME,
        "messages": [{"role": "user", "content": "Sort."}],
        **FIELDS,
    }
    assert stub.requests[2]["messages"] == [
        {"role": "user", "content": "Sort."},
        {"role": "assistant", "content": "sorted"},
        {"role": "user", "content": "Faster."},
    ]
    assert stub.requests[3]["messages"] == [{"role": "user", "content": "Who?"}]
    assert set(stub.keys) == {"Bearer secret"}


def test_without_a_chat_template_the_prompt_is_text() -> None:
    with stub_server(VLLMMetrics(3), ANSWERS) as stub:
        ask(MeasuredServer(stub.url, chat=False), QUESTIONS, FIELDS)
    assert stub.requests[2]["prompt"] == "Sort.\nsorted\nFaster."
    assert "messages" not in stub.requests[2]


def test_tokens_for_strangers_are_reported() -> None:
    with stub_server(VLLMMetrics(3), ANSWERS) as stub:
        stub.stranger = MadeUpAnswer("other", 7, (2,))
        answers = ask(MeasuredServer(stub.url), QUESTIONS, FIELDS)
    assert [answer.tokens_of_strangers for answer in answers] == [7, 7, 7]


def test_a_question_ends_before_a_turn_that_is_refused() -> None:
    with stub_server(VLLMMetrics(3), ANSWERS) as stub:
        stub.refused = "Faster"
        refusals: list[str] = []
        answers = ask(MeasuredServer(stub.url), QUESTIONS, FIELDS, refusals)
        assert [answer.category for answer in answers] == ["coding", "rag"]
        assert len(refusals) == 1
        assert "answers 400" in refusals[0]
        with pytest.raises(InputError, match="answers 400"):
            ask(MeasuredServer(stub.url), QUESTIONS, FIELDS)
        with pytest.raises(InputError, match="answers 400"):
            ask(MeasuredServer(stub.url), [Question("coding", ("Faster.",))], FIELDS, [])


def test_counters_of_another_server_are_refused() -> None:
    class Elsewhere(VLLMMetrics):
        def count(self, answer: MadeUpAnswer) -> None:
            """Count nothing: another server has answered."""

    with (
        stub_server(Elsewhere(3), ANSWERS) as stub,
        pytest.raises(InputError, match="counted 0 tokens"),
    ):
        ask(MeasuredServer(stub.url), QUESTIONS, FIELDS)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:8000", "give an address such as"),
        ("ftp://localhost", "give an address such as"),
        ("http://127.0.0.1:9", "cannot be reached"),
    ],
)
def test_an_address_without_a_server_is_refused(url, words) -> None:
    with pytest.raises(InputError, match=words):
        MeasuredServer(url)


def test_a_servers_error_is_shown() -> None:
    with stub_server(VLLMMetrics(3), ANSWERS) as stub:
        model = MeasuredServer(stub.url, "a name")
        model.url += "/elsewhere"
        with pytest.raises(InputError, match="answers 404"):
            model.counters()


class _CountingEngine(MadeUpEngine):
    """Our server's engine, which counts four steps for every text, with room for more positions."""

    def submit(self, *arguments, **options):
        handle = super().submit(*arguments, **options)
        self.counted |= {
            "drafted_steps": self.counted["drafted_steps"] + 4,
            "drafted": self.counted["drafted"] + 12,
            "accepted": self.counted["accepted"] + 6,
            "accepted_at": tuple(
                count + more
                for count, more in zip(self.counted["accepted_at"], (3, 2, 1, 0, 0), strict=True)
            ),
        }
        return handle


def test_our_own_server_is_measured() -> None:
    engine = _CountingEngine("The text.")
    engine.counted["accepted_at"] = (4, 2, 1, 0, 0)
    with serving(engine) as (host, port):
        answers = ask(MeasuredServer(f"http://{host}:{port}"), QUESTIONS, {"max_tokens": 9})
    assert [answer.tokens for answer in answers] == [9, 9, 9]
    assert sum(answer.tokens_of_strangers for answer in answers) == 0
    growth = total_growth(answers)
    assert (growth.names, growth.draft_length) == ("vllm", 3)
    assert growth.accepted_at == (9, 6, 3, 0, 0)
    assert growth.steps.length("drafts") == 1 + 6 / 4
