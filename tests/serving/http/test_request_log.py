"""Check the log lines of requests: their fields, their ids, and that they never have text."""

import asyncio
import json
import logging
from typing import Any

import httpx2
import pytest

from specjax.serving.http.app import make_app
from specjax.serving.http.request_log import LOGGER, as_text, show_requests
from specjax.serving.http.service import AppOptions, Service
from tests.serving.http.made_up import MadeUpEngine

SECRET = "a secret prompt"
BODY = {"model": "tiny", "prompt": SECRET, "max_tokens": 5}


@pytest.fixture
def app() -> Any:
    return make_app(Service(MadeUpEngine("answer"), AppOptions(names=("tiny",))))


def ask(app: Any, path: str = "/v1/completions", body: Any = None, **headers: str) -> Any:
    async def send() -> Any:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            if body is None:
                return await client.get(path, headers=headers)
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(send())


def lines(caplog) -> list[dict[str, Any]]:
    return [record.request for record in caplog.records if record.name == LOGGER.name]


@pytest.fixture(autouse=True)
def _captured(caplog):
    LOGGER.propagate = True  # so that the records reach pytest
    caplog.set_level(logging.DEBUG, LOGGER.name)


def test_a_line_says_what_was_asked_and_how_it_went(app, caplog) -> None:
    answer = ask(app, body=BODY, **{"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    (line,) = lines(caplog)
    assert (line["id"], line["path"], line["status"]) == ("mine-1", "/v1/completions", 200)
    assert (line["model"], line["texts"], line["finish_reason"]) == ("tiny", 1, "length")
    assert line["prompt_tokens"] > 0
    assert line["output_tokens"] > 0
    assert line["seconds"] >= 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_never_has_text(app, caplog, stream) -> None:
    ask(app, body=BODY | {"stream": stream})
    chat = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}
    ask(app, "/v1/chat/completions", body=chat | {"stream": stream})
    ask(app, body=BODY | {"n": 0})
    ask(app, body=BODY | {"model": "another"})
    assert len(lines(caplog)) == 4
    logged = "".join(record.getMessage() + json.dumps(record.request) for record in caplog.records)
    assert SECRET not in logged
    assert "answer" not in logged


def test_a_refused_request_has_a_line_with_its_status(app, caplog) -> None:
    assert ask(app, body=BODY | {"n": 0}).status_code == 400
    assert ask(app, "/nowhere").status_code == 404
    assert [(line["path"], line["status"]) for line in lines(caplog)] == [
        ("/v1/completions", 400),
        ("/nowhere", 404),
    ]
    assert "model" not in lines(caplog)[0]


@pytest.mark.parametrize("sent", ["", "a b", "a" * 129, 'new"id\t'])
def test_an_id_that_is_not_a_short_word_is_replaced(app, caplog, sent) -> None:
    answer = ask(app, body=BODY, **{"X-Request-Id": sent})
    (line,) = lines(caplog)
    assert answer.headers["x-request-id"] == line["id"] != sent
    assert len(line["id"]) == 32


def test_probes_are_logged_for_debugging_alone(app, caplog) -> None:
    ask(app, "/health")
    ask(app, "/metrics")
    assert {record.levelno for record in caplog.records if record.name == LOGGER.name} == {
        logging.DEBUG
    }


def test_lines_are_printed_as_text_or_as_json(app, capsys) -> None:
    show_requests("text")
    ask(app, body=BODY, **{"X-Request-Id": "one"})
    (text,) = capsys.readouterr().err.splitlines()
    assert " id=one method=POST path=/v1/completions status=200 " in text
    show_requests("json")
    ask(app, body=BODY, **{"X-Request-Id": 'two"\\'})
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert line["id"] == 'two"\\'
    assert line["status"] == 200
    assert line["time"] > 1.7e9
    show_requests("off")
    ask(app, body=BODY)
    assert capsys.readouterr().err == ""


def test_a_word_that_could_be_misread_is_quoted() -> None:
    line = {"path": "/a\nid=2", "model": "m=1", "id": '"', "of": "50%", "back": "\\"}
    assert as_text(line) == r'path="/a\nid=2" model="m=1" id="\"" of=50% back="\\"'
