"""Measure the acceptance of a server process, and compare with what it reports in each answer."""

import json
import urllib.request

import pytest

from specjax.evaluation.questions import Question
from specjax.evaluation.served import MeasuredServer, ask, total_growth
from tests.serving.http.conftest import KEY, Server

pytestmark = pytest.mark.full  # the server compiles for half a minute

QUESTIONS = [Question("coding", ("def add(a, b):", "def mul(a, b):")), Question("rag", ("import",))]
FIELDS = {"max_tokens": 24, "temperature": 0.0}


def reported(server: Server, messages: list[dict[str, str]]) -> tuple[str, dict[str, int]]:
    """Return the text of an answer, and the acceptance that it reports."""
    body = json.dumps({"model": "tiny", "messages": messages, **FIELDS}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content = json.load(answer)
    return content["choices"][0]["message"]["content"], content["metrics"]["speculative_decoding"]


def test_the_counters_of_our_server_agree_with_its_answers(server: Server) -> None:
    answers = ask(MeasuredServer(server.url, "tiny", KEY), QUESTIONS, FIELDS)
    assert sum(answer.tokens_of_strangers for answer in answers) == 0
    reports = []
    for question in QUESTIONS:
        messages = []
        for turn in question.turns:
            messages.append({"role": "user", "content": turn})
            text, report = reported(server, messages)
            messages.append({"role": "assistant", "content": text})
            reports.append(report)
    measured = [(answer.growth.drafts, answer.growth.accepted) for answer in answers]
    assert measured == [
        (report["num_spec_steps"], report["num_accepted_draft_tokens"]) for report in reports
    ]
    growth = total_growth(answers)
    assert growth.names == "vllm"
    assert growth.draft_length == 3
    assert 1 < growth.steps.length("drafts") <= 4
