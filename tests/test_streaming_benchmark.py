"""The benchmark of streaming: its parts add up, and it refuses a stream that is not whole."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import streaming, streaming_server
from benchmarks.streaming import StreamingConfig
from specjax.errors import InputError

ROOT = Path(streaming.__file__).parents[1]


def spend(seconds: float) -> None:
    begin = time.thread_time()
    while time.thread_time() < begin + seconds:
        pass


def test_a_part_does_not_count_the_parts_inside_of_it() -> None:
    def outer() -> None:
        spend(0.02)
        work.inner()

    work = SimpleNamespace(outer=outer, inner=lambda: spend(0.04))
    parts = streaming_server.Parts()
    parts.watch(work, "outer", "first")
    parts.watch(work, "inner", "second")
    work.outer()
    work.inner()
    parts.stop()
    assert parts.calls == {"first": 1, "second": 2}
    seconds = parts.seconds()
    assert seconds["first"] == pytest.approx(0.02, abs=0.005)
    assert seconds["second"] == pytest.approx(0.08, abs=0.005)
    work.inner()  # is as it was before
    assert parts.seconds() == seconds


def chunked(*events: str) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in map(str.encode, events))
    return b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n" + body + b"0\r\n\r\n"


def test_the_text_of_a_stream_is_that_of_its_events() -> None:
    events = [
        'data: {"choices": [{"delta": {"reasoning": "a"}}]}\n\n',
        'data: {"choices": [{"delta": {"content": "b"}}]}\n\n',
        'data: {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "c"}}]}}]}\n\n',
    ]
    assert streaming._text_of(chunked(*events, "data: [DONE]\n\n")) == ("abc", 3)
    with pytest.raises(RuntimeError, match="not complete"):
        streaming._text_of(chunked(*events))
    with pytest.raises(RuntimeError, match="500"):
        streaming._text_of(b"HTTP/1.1 500 Internal Server Error\r\n\r\n")


@pytest.mark.thorough
def test_a_run_reports_all_parts_of_each_checkout(tmp_path: Path) -> None:
    config = StreamingConfig(checkouts=(str(ROOT),), clients=2, tokens=100, step=1.0, repeats=1)
    results = streaming.run_all(config)
    assert set(results) == set(streaming.TEXTS)
    for by_checkout in results.values():
        (run,) = by_checkout[str(ROOT)]
        assert run["total"] == pytest.approx(run["loop"] + run["engine"])
        assert run["total"] == pytest.approx(sum(run["parts"].values()))
        # A part that took no time that the clock shows is left out.
        assert 6 <= len(run["parts"]) <= 8 and 0.5 < run["events"] <= 1.1
    streaming.show(config, results)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="tokens=5"):
        streaming.main(StreamingConfig(tokens=5))
