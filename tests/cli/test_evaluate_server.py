"""Check ``specjax evaluate --server`` on servers that count as vLLM and as SGLang."""

import json

import pytest
import yaml

from specjax.cli.main import main
from specjax.evaluation import served
from tests.evaluation.stub_server import (
    NAME,
    MadeUpAnswer,
    SGLangMetrics,
    VLLMMetrics,
    stub_server,
)

RECORDS = [
    {"category": "coding", "turns": ["Sort.", "Faster."]},
    {"category": "rag", "turns": ["Who?"]},
]
ANSWERS = [
    MadeUpAnswer("sorted", 9, (3, 0, 2)),
    MadeUpAnswer("faster", 4, (1, 1)),
    MadeUpAnswer("somebody", 12, (3, 3, 3)),
]


@pytest.fixture(autouse=True)
def _direct(monkeypatch) -> None:
    monkeypatch.setattr(served, "_PAUSE_SECONDS", 0.001)


@pytest.fixture
def questions(tmp_path) -> str:
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return str(file)


def measure(metrics, questions: str, output, *options: str):
    """Measure a stub; return it, and the content of results.json."""
    with stub_server(metrics, ANSWERS) as stub:
        command = ["evaluate", "--server", stub.url, "--questions", questions, *options]
        assert main([*command, "--output", str(output)]) == 0
    return stub, json.loads((output / "results.json").read_text())


def test_speed_bench_on_vllm(questions, tmp_path, capsys) -> None:
    output = tmp_path / "out"
    options = ("--protocol", "speed-bench", "--thinking", "off", "--max-new-tokens", "64")
    stub, report = measure(VLLMMetrics(3), questions, output, *options)
    assert stub.requests[1]["max_tokens"] == 64
    assert stub.requests[1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert report["server"] | {"url": ""} == {
        "url": "",
        "model": NAME,
        "counters": "vllm",
        "drafts": 8,
        "tokens_of_strangers": 0,
        "refused_turns": 0,
    }
    assert report["protocol"]["differences"] == [
        "2 questions instead of 880",
        "max_new_tokens 64 instead of 4096",
        "length as 1 + accepted tokens / passes with a draft instead of emitted tokens / passes of"
        " the target, which was not counted",
    ]
    assert list(report["results"]) == ["coding", "rag", "overall"]
    overall = report["results"]["overall"][NAME]
    assert overall["acceptance_length_pooled"] == 1 + 16 / 8
    assert overall["acceptance_length_of_drafts"] == 1 + 16 / 8
    assert overall["acceptance_length_of_requests"] == pytest.approx((1 + 5 / 3 + 2 + 4) / 3)
    conversations = ((1 + 7 / 5) + 4) / 2
    assert overall["acceptance_length_of_conversations"] == pytest.approx(conversations)
    assert overall["acceptance_length_by_protocol"] == pytest.approx(conversations)
    assert overall["acceptance_by_position"] == [7 / 8, 5 / 8, 4 / 8]
    assert overall["tokens_per_second"] > 0
    golden = yaml.safe_load((output / "golden_al_owner_Model-8B.yaml").read_text())
    assert golden == {"model-8b": {"thinking_off": {3: 3.0}}}
    printed = capsys.readouterr().out
    assert "Differs from the protocol: 2 questions instead of 880." in printed
    assert "length, by protocol" in (output / "results.md").read_text()


def test_vllm_80_on_sglang(questions, tmp_path) -> None:
    options = ("--protocol", "vllm-80", "--temperature", "0.5")
    stub, report = measure(SGLangMetrics(5), questions, tmp_path / "out", *options)
    # The first turn of the question of MT-bench alone.
    assert [request["messages"][-1]["content"] for request in stub.requests[1:]] == ["Sort."]
    assert stub.requests[1]["max_tokens"] == 256
    assert stub.requests[1]["seed"] == 0
    overall = report["results"]["overall"][NAME]
    assert overall["acceptance_length_by_protocol"] == 9 / 3
    assert overall["acceptance_length_of_drafts"] is None
    assert report["protocol"]["differences"] == [
        "1 questions instead of 80",
        "temperature 0.5 instead of 0",
        "length as emitted tokens / passes of the target instead of 1 + accepted tokens / passes"
        " with a draft, which was not counted",
        f"{NAME} drafts chain of 5 instead of chain of 3",
    ]


def test_without_a_protocol(questions, tmp_path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = ("--served-model-name", "mine", "--api-key-file", str(key), "--per-category", "1")
    options += ("--top-p", "0.9", "--temperature", "1", "--categories", "mt-bench")
    stub, report = measure(VLLMMetrics(2), questions, tmp_path / "out", *options)
    assert stub.requests[1]["model"] == "mine"
    assert stub.requests[1]["top_p"] == 0.9
    assert stub.requests[1]["max_tokens"] == 128
    assert set(stub.keys) == {"Bearer secret"}
    assert len(stub.requests) == 3
    assert "protocol" not in report
    assert "acceptance_length_by_protocol" not in report["results"]["overall"]["mine"]
    assert not list((tmp_path / "out").glob("*.yaml"))


def test_refused_turns_are_a_difference(questions, tmp_path, capsys) -> None:
    output = tmp_path / "out"
    with stub_server(VLLMMetrics(3), ANSWERS) as stub:
        stub.refused = "Faster"
        command = ["evaluate", "--server", stub.url, "--questions", questions]
        assert main([*command, "--protocol", "spec-bench", "--output", str(output)]) == 0
    report = json.loads((output / "results.json").read_text())
    assert report["server"]["refused_turns"] == 1
    text = "1 turns and those after them were left out: the server refused them"
    assert text in report["protocol"]["differences"]
    assert "The first refusal: server=" in capsys.readouterr().out


def test_other_requests_are_reported(questions, tmp_path, capsys) -> None:
    with stub_server(VLLMMetrics(3), ANSWERS) as stub:
        stub.stranger = MadeUpAnswer("other", 7, (2,))
        assert main(["evaluate", "--server", stub.url, "--questions", questions]) == 0
    assert "also generated 21 tokens for requests of others" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server", "http://127.0.0.1:9", "--drafter", "prompt-lookup"], "decides about drafter"),
        (["--server", "http://127.0.0.1:9", "--target", "a"], "decides about target"),
        (["--server", "http://127.0.0.1:9", "--corpus", "a"], "decides about corpus"),
        (["--server", "http://127.0.0.1:9"], "cannot be reached"),
        (["--server", "nowhere"], "give an address"),
        (["--served-model-name", "a"], "it requires --server"),
        (["--lossless", "--protocol", "vllm-80"], "leave out protocol"),
        (["--lossless", "--thinking", "on"], "leave out protocol"),
        pytest.param(
            ["--thinking", "on"], "the chat template has no switch", marks=pytest.mark.full
        ),
        (["--thinking", "on", "--chat", "False"], "the chat template switches it"),
        (["--protocol", "vllm-80", "--regex", "a+"], "its answers are free text"),
        (["--categories", "poems"], "categories='poems'"),
    ],
)
def test_what_cannot_be_measured_is_refused(tiny_pair, questions, options, words, capsys) -> None:
    target = [] if "--server" in options else ["--target", tiny_pair[0]]
    target += [] if "--server" in options else ["--drafter", "prompt-lookup"]
    assert main(["evaluate", "--questions", questions, *target, *options]) == 2
    assert words in capsys.readouterr().err
