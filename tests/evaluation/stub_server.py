"""A server that answers with made-up texts and counts as vLLM or SGLang does.

The counters are registered with prometheus_client, which both use, by the names, the labels and at
the moments of their sources:

- vLLM: ``vllm/v1/spec_decode/metrics.py``, class ``SpecDecodingProm``, and
  ``vllm/v1/metrics/loggers.py`` for the generated tokens. All counters exist from the start, for
  each engine.
- SGLang: ``python/sglang/srt/observability/metrics_collector.py``, classes
  ``SchedulerMetricsCollector`` and ``TokenizerMetricsCollector``. A counter has no value before the
  first request has ended, and both are raised when a request ends.
"""

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from unittest.mock import patch

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

NAME = "owner/Model-8B"


@dataclass(frozen=True)
class MadeUpAnswer:
    """An answer and its steps.

    Attributes:
        text: the text.
        tokens: the number of its tokens.
        accepted: for each verified draft, how many of its tokens were accepted.
    """

    text: str
    tokens: int
    accepted: tuple[int, ...]


class StubMetrics(Protocol):
    """The counters of a stub."""

    registry: CollectorRegistry

    def count(self, answer: MadeUpAnswer) -> None:
        """Count an answer that has ended."""
        ...


class VLLMMetrics:
    """Counters as vLLM has them, of two engines that take turns."""

    def __init__(self, length: int) -> None:
        self.registry, self._length, self._engine = CollectorRegistry(), length, 0
        labels = ["model_name", "engine"]

        def counter(name: str, *more: str) -> Counter:
            return Counter(name, "made up", [*labels, *more], registry=self.registry)

        self._drafts = counter("vllm:spec_decode_num_drafts")
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens")
        self._by_position = counter("vllm:spec_decode_num_accepted_tokens_per_pos", "position")
        self._generated = counter("vllm:generation_tokens")
        for engine in "01":
            for family in (self._drafts, self._draft_tokens, self._accepted, self._generated):
                family.labels(NAME, engine)
            for position in range(length):
                self._by_position.labels(NAME, engine, str(position))

    def count(self, answer: MadeUpAnswer) -> None:
        labels = (NAME, str(self._engine))
        self._engine = 1 - self._engine
        self._generated.labels(*labels).inc(answer.tokens)
        self._drafts.labels(*labels).inc(len(answer.accepted))
        self._draft_tokens.labels(*labels).inc(self._length * len(answer.accepted))
        self._accepted.labels(*labels).inc(sum(answer.accepted))
        for accepted in answer.accepted:
            for position in range(accepted):
                self._by_position.labels(*labels, str(position)).inc()


class SGLangMetrics:
    """Counters as SGLang has them; ``has_counter=False``: those of before its counter of passes."""

    def __init__(self, length: int, has_counter: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": NAME}
        names = list(self._labels)
        gauges = {"sglang:spec_accept_length": 2.5, "sglang:spec_accept_rate": 0.5}
        if has_counter:
            gauges["sglang:spec_num_steps"] = length
        for name, value in gauges.items():
            gauge = Gauge(name, "made up", [*names, "tp_rank"], registry=self.registry)
            for rank in "01":
                gauge.labels(NAME, rank).set(value)
        self._generated = Counter(
            "sglang:generation_tokens_total", "made up", names, registry=self.registry
        )
        self._passes = (
            Counter("sglang:spec_verify_calls_total", "made up", names, registry=self.registry)
            if has_counter
            else None
        )

    def count(self, answer: MadeUpAnswer) -> None:
        self._generated.labels(**self._labels).inc(answer.tokens)
        if self._passes is not None and answer.accepted:
            self._passes.labels(**self._labels).inc(len(answer.accepted))


class Stub:
    """A running server.

    Attributes:
        url: its address.
        requests: the bodies of all requests for answers, in order.
        keys: the values of their Authorization headers.
        metrics: its counters.
    """

    def __init__(self, metrics: StubMetrics, answers: Sequence[MadeUpAnswer]) -> None:
        self.metrics, self._answers = metrics, answers
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.refused = ""
        """A text; a request whose last message has it is refused as too long."""
        self.stranger: MadeUpAnswer | None = None
        """An answer to somebody else, which is counted beside each of ours."""

    def answer(self, path: str, body: dict[str, Any], key: str | None) -> dict[str, Any]:
        """Return the answer to a request; the answers come in turn, after the warm-up's."""
        self.requests.append(body)
        self.keys.append(key)
        answer = self._answers[(len(self.requests) - 2) % len(self._answers)]
        self.metrics.count(answer)
        if self.stranger is not None:
            self.metrics.count(self.stranger)
        choice = (
            {"message": {"role": "assistant", "content": answer.text}}
            if path == "/v1/chat/completions"
            else {"text": answer.text}
        )
        return {"choices": [choice], "usage": {"completion_tokens": answer.tokens}}


@contextmanager
def stub_server(metrics: StubMetrics, answers: Sequence[MadeUpAnswer]) -> Iterator[Stub]:
    """Run a stub at a free port of this machine."""
    stub = Stub(metrics, answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.reply(generate_latest(stub.metrics.registry))
            elif self.path == "/v1/models":
                self.reply(json.dumps({"data": [{"id": NAME}]}).encode())
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if stub.refused and stub.refused in body["messages"][-1]["content"]:
                self.send_error(400, "too long")
                return
            answer = stub.answer(self.path, body, self.headers["Authorization"])
            self.reply(json.dumps(answer).encode())

        def reply(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with (
        patch.dict(os.environ, {"no_proxy": "127.0.0.1"}),
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server,
    ):
        stub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()
