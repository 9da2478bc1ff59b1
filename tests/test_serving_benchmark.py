"""The benchmark of servers: its counts are right, and three kinds of files hold one model."""

import asyncio
import itertools
import json
import time
from dataclasses import replace

import numpy as np
import pytest

import specjax
from benchmarks import serving, serving_clients, serving_models, serving_servers
from benchmarks.serving_clients import Answer, Request
from specjax.assets import embedded
from specjax.errors import InputError
from specjax.text import load_tokenizer


class Letters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[str]:
        assert not add_special_tokens
        return list(text)


def answered(
    sent: float,
    arrivals: list[float],
    pieces: list[str],
    finished: float | None,
    tokens: int | None = None,
) -> Answer:
    usage = None if tokens is None else {"completion_tokens": tokens}
    return Answer(Request("", 8), sent, arrivals, pieces, finished, usage)


def test_what_clients_saw_is_counted() -> None:
    answers = [
        answered(10.0, [11.0, 13.0], ["ab", "cde"], 13.5),
        answered(10.0, [10.5, 10.5, 14.5], ["x", "yz", "w"], 15.0, tokens=9),
        answered(14.0, [16.0], ["abc"], None),  # cut short: its tokens count, its times do not
    ]
    figures = serving_clients.figures(answers, 20.0, Letters())
    assert figures["tokens_per_second"] == (5 + 9 + 3) / 10.0
    assert figures["requests"] == 2
    assert figures["seconds_per_request_p50"] == (3.5 + 5.0) / 2
    assert figures["first_token_p90"] == pytest.approx(0.5 + 0.9 * 0.5)
    assert figures["between_tokens_p50"] == pytest.approx((2.0 / 4 + 4.0 / 8) / 2)
    assert figures["pause_p50"] == 2.0  # of 0, 2 and 4
    unfinished = serving_clients.figures(answers[2:], 20.0, Letters())
    assert unfinished == {"tokens_per_second": 0.5, "requests": 0.0}
    spreads = serving.spreads([figures, unfinished])
    assert spreads["requests"] == {"low": 0.0, "middle": 1.0, "high": 2.0}
    assert spreads["pause_p50"] == {"low": 2.0, "middle": 2.0, "high": 2.0}


def test_clients_go_on_until_each_has_had_an_answer() -> None:
    """Check that a request that is answered after the time is up is waited for.

    Then both clients hang up.
    """
    numbers = itertools.count()
    is_time_up = asyncio.Event()

    async def ask(answer: Answer) -> None:
        answer.add("a")
        number = next(numbers)
        if number == 0:  # the first client's: the other one has three answers meanwhile
            await is_time_up.wait()
        elif number == 4:
            await asyncio.sleep(0.1)  # longer than the clients run
            is_time_up.set()
        if number >= 4:
            await asyncio.sleep(60)
        answer.finished = time.perf_counter()

    endless = itertools.repeat(Request("", 8))
    answers = asyncio.run(serving_clients.for_seconds(ask, endless, 2, 0.05, 30.0))
    whole = [answer for answer in answers if answer.finished]
    assert (len(answers), len(whole)) == (6, 4)
    assert all(answer.text == "a" for answer in answers)
    began = time.perf_counter()
    answers = asyncio.run(serving_clients.for_seconds(ask, endless, 1, 0.05, 0.2))  # never answered
    assert time.perf_counter() - began < 10 and len(answers) == 1


def test_a_list_is_worked_through_in_its_order() -> None:
    async def ask(answer: Answer) -> None:
        await asyncio.sleep(answer.request.max_tokens / 1000)
        answer.add(answer.request.prompt)

    requests = [Request(name, most) for name, most in (("slow", 50), ("a", 1), ("b", 1), ("c", 1))]
    answers = asyncio.run(serving_clients.work_through(ask, requests, clients=2))
    assert [answer.text for answer in answers] == ["slow", "a", "b", "c"]
    assert all(answer.sent > 0 for answer in answers)


def ask_a_socket(content: bytes, request: Request) -> tuple[Answer, dict]:
    """Return the answer of a server that sends ``content``, and the body of the request."""
    bodies = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        for i in range(0, len(content), 7):  # in small pieces, as it may arrive
            writer.write(content[i : i + 7])
            await writer.drain()
        writer.close()

    async def both() -> Answer:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            answer = Answer(request, 0.0)
            port = server.sockets[0].getsockname()[1]
            await serving_clients.over_http(port, "pair", {"top_k": 0})(answer)
            return answer

    answer = asyncio.run(both())
    return answer, bodies[0]


def test_streams_are_read_however_they_are_cut() -> None:
    def event(**content) -> bytes:
        return b"data: " + json.dumps(content).encode() + b"\n\n"

    events = event(choices=[{"text": "im"}]) + event(choices=[{"text": "port"}])
    events += event(choices=[], usage={"completion_tokens": 2}) + b"data: [DONE]\n\n"
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(part), part) for part in (events[:30], events[30:31], events[31:])
    )
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    request = Request("x = ", 8, 0.5, seed=3, more={"ignore_eos": True})
    for content in (
        b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n",
        b"\r\n" + events,
    ):
        answer, body = ask_a_socket(head + content, request)
        assert (answer.text, answer.usage) == ("import", {"completion_tokens": 2})
        assert len(answer.arrivals) == 2 and answer.finished >= answer.arrivals[-1]
    assert body == {
        "model": "pair",
        "prompt": "x = ",
        "max_tokens": 8,
        "stream": True,
        "temperature": 0.5,
        "seed": 3,
        "top_k": 0,
        "ignore_eos": True,
    }
    with pytest.raises(InputError, match=r"HTTP/1.1 429 Too Many Requests: \{.error"):
        ask_a_socket(b'HTTP/1.1 429 Too Many Requests\r\nA: b\r\n\r\n{"error": "later"}', request)
    with pytest.raises(InputError, match="the server answers it broke"):
        ask_a_socket(head + b"\r\n" + event(error="it broke"), request)


def test_the_prediction_has_every_tenth_line_wrong() -> None:
    lines = [f"    line_{i}" for i in range(25)]
    changed = serving.with_changed_lines("\n".join(lines)).split("\n")
    assert len(changed) == len(lines)
    assert [i for i, line in enumerate(lines) if changed[i] != line] == [9, 19]
    assert changed[9] == "    changed_9 = None"


def test_requests_are_lines_of_modules_and_the_same_for_everyone(tmp_path) -> None:
    config = serving.ServingConfig(context=40)
    bench = serving.Bench(config, tmp_path, load_tokenizer(embedded("target")))
    requests, same_seed, other_seed = (
        serving.first_of(serving.requests_of(bench, 0.8, seed), 20) for seed in (1, 1, 2)
    )
    assert requests == same_seed and requests != other_seed
    for request in requests:
        assert len(bench.tokenizer.encode(request.prompt)) >= 30 and request.prompt.endswith("\n")
        assert 64 <= request.max_tokens <= 128 and request.temperature == 0.8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"repeats": 0}, "repeats=0: must be at least 1"),
        ({"clients": (1, 0)}, r"clients=\(1, 0\)"),
        ({"longest": 8}, "longest=8: must be at least shortest=64"),
        ({"seconds": 60.0}, "at most patience=30"),
        ({"plot": "a.png", "parts": ("http",)}, "is a picture of part clients"),
        ({"llama_python": "/nowhere/python"}, "llama-cpp-python is not installed there"),
    ],
)
def test_servers_that_cannot_be_measured_are_refused_by_name(changes, words) -> None:
    with pytest.raises(InputError, match=words):
        serving.check(serving.ServingConfig(**changes))


def test_a_server_that_ends_says_what_it_printed(tmp_path) -> None:
    server = serving_servers.Server(("sh", "-c", "echo no such model; exit 3"), "pair")
    with pytest.raises(InputError, match="does not answer; it printed\nno such model"):
        serving_servers.Running(server, tmp_path / "log", {}, seconds=30)


@pytest.mark.thorough  # the package gguf
def test_the_same_weights_are_in_all_files(tmp_path) -> None:
    """Read the inflated pair back, and compare it with the weights in GGUF.

    GGUF has the rows of q and k in another order within a head.
    """
    from gguf import GGUFReader

    assert serving_models.write_pair(tmp_path, (288, 576, 13), 2048) > 10e6
    target = specjax.Target.from_pretrained(tmp_path / "target")
    drafter = specjax.Eagle3.from_pretrained(tmp_path / "eagle3", draft="chain:4")
    small = specjax.Target.from_pretrained(embedded("target"))
    prompt = np.array(
        [load_tokenizer(embedded("target")).encode("class Stack:\n    def __init__(self):\n")]
    )
    inflated = specjax.generate(target, drafter, prompt, max_new_tokens=48)
    before = specjax.generate(
        small,
        replace(specjax.Eagle3.from_pretrained("embedded:eagle3"), draft=drafter.draft),
        prompt,
        max_new_tokens=48,
    )
    assert np.array_equal(inflated.tokens, before.tokens)
    # The drafter drafts the same as before.
    assert np.array_equal(inflated.stats.histogram, before.stats.histogram)
    serving_models.write_gguf(tmp_path / "target", tmp_path / "target.gguf")
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "target.gguf").tensors}
    assert len(tensors) == 2 + 9 * 13
    layer = target.params["layers"][1]
    assert np.array_equal(tensors["blk.1.ffn_up.weight"].data, np.asarray(layer["up"]).T)
    heads, dim = target.config.num_heads, target.config.head_dim
    pairs = tensors["blk.1.attn_q.weight"].data.reshape(heads, dim // 2, 2, -1)
    halves = pairs.swapaxes(1, 2).reshape(heads * dim, -1)
    assert np.array_equal(halves, np.asarray(layer["q"]).T)


@pytest.mark.thorough  # four servers
def test_servers_are_measured(tmp_path, capsys) -> None:
    output, plot = tmp_path / "found.json", tmp_path / "found.png"
    small = {
        "inflate": (0, 0, 0),
        "rows": 2,
        "drafts": ("chain:2",),
        "clients": (1, 2),
        "sampled_clients": (2,),
        "seconds": 0.5,
    }
    small |= {
        "shortest": 8,
        "longest": 16,
        "repeats": 1,
        "agreement": 2,
        "http_requests": 4,
        "http_repeats": 1,
        "prediction_repeats": 1,
    }
    small |= {"prediction_tokens": 200, "positions": 1024, "start_seconds": 600.0, "patience": 60.0}
    serving.main(serving.ServingConfig(**small, output=str(output), plot=str(plot)))
    results = json.loads(output.read_text())
    names = {serving.EAGLE3, serving.PLAIN, "transformers"}
    margins = {name: row["margins"] for name, row in results["agreement"].items()}
    assert margins == {name: [] for name in names}
    cases = [(case["temperature"], case["clients"]) for case in results["clients"]]
    assert cases == [(0.0, 1), (0.0, 2), (0.8, 2)]
    for case in results["clients"]:
        assert set(case["servers"]) == names
        for run in case["servers"].values():
            assert run["requests"]["middle"] >= case["clients"]
            assert 0 < run["first_token_p50"]["middle"] <= run["seconds_per_request_p50"]["middle"]
    assert results["http"]["same_texts"] and results["http"]["http_over_engine"]["middle"] > 0.2
    prediction = results["prediction"]
    assert prediction["same_text"] == 1.0 and prediction["lines"] > 10
    for row in prediction["servers"].values():
        assert row["usage"]["accepted_prediction_tokens"] > 50
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "http over engine" in capsys.readouterr().out
