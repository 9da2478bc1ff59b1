"""What Prometheus is told, under vLLM's names, so that its dashboards can be used.

What the engine counts is read when somebody asks. What belongs to a text is observed while it grows, by a task that reads the
same pieces as whoever asked for it: a client that reads slowly does not make the engine look slow.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specjax.serving.handle import EngineError, Handle, TextCancelledError
from specjax.serving.sessions import SessionStatistics

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


class Metrics:
    """The metrics of one server.

    Attributes:
        registry: of this server alone.
    """

    def __init__(self, engine: Any, model: str, sessions: SessionStatistics | None = None) -> None:
        """Of an ``engine`` that serves ``model``, and of the ``sessions`` of clients that draft."""
        self.registry = CollectorRegistry()
        self._label = {"model_name": model}
        self._watching: set[asyncio.Task[None]] = set()
        self.registry.register(_OfEngine(engine, model, sessions))  # pyright: ignore[reportArgumentType]
        names = ["model_name"]
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From the request to its first token.")
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens. Tokens that come together share the seconds since the ones before them.",
        )
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From the request to the end of its text.")
        self._finished = Counter(
            "vllm:request_success", "Texts that have ended.", [*names, "finished_reason"], registry=self.registry
        )
        for reason in _FINISHED.values():
            self._finished.labels(model, reason)
        self._prompt = Counter("vllm:prompt_tokens", "Tokens of prompts.", names, registry=self.registry).labels(model)
        self._generated = Counter("vllm:generation_tokens", "Generated tokens.", names, registry=self.registry).labels(model)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(name, about, ["model_name"], buckets=_SECONDS, registry=self.registry).labels(**self._label)

    def exposition(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)

    def watch(self, handle: Handle, prompt_tokens: int) -> None:
        """Observe a text until it ends, and count ``prompt_tokens`` when it begins. Needs a running event loop."""
        task = asyncio.get_running_loop().create_task(self._watch(handle, prompt_tokens))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(self, handle: Handle, prompt_tokens: int) -> None:
        before = None
        with suppress(TextCancelledError, EngineError):
            async for piece in handle:
                now = time.perf_counter()
                self._prompt.inc(prompt_tokens)  # with the first piece, which has no tokens where a prompt is only read
                prompt_tokens = 0
                if not piece.tokens:
                    continue
                if before is None:
                    self._first.observe((handle.times.first_token or now) - handle.times.submitted)
                else:
                    for _ in piece.tokens:
                        self._between.observe((now - before) / len(piece.tokens))
                before = now
                self._generated.inc(len(piece.tokens))
        self._finished.labels(self._label["model_name"], _FINISHED[handle.finish_reason or "error"]).inc()
        if handle.finish_reason in ("stop", "length") and handle.times.finished is not None:
            self._whole.observe(handle.times.finished - handle.times.submitted)


class _OfEngine:
    """Reads an engine's statistics whenever it is asked."""

    def __init__(self, engine: Any, model: str, sessions: SessionStatistics | None) -> None:
        self._engine, self._model, self._sessions = engine, model, sessions

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        is_ = self._engine.statistics
        yield self._gauge("vllm:num_requests_running", "Texts that are being generated.", is_.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that have no row.", is_.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the pages in use, 1 is all.", 1 - is_.free_pages / is_.pages)
        yield self._counter("vllm:num_preemptions", "Texts that had to give up their row.", is_.preemptions)
        queries = is_.prompt_tokens_read + is_.prompt_tokens_shared
        yield self._counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked for in the cache.", queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens of prompts that were in the cache.", is_.prompt_tokens_shared)
        yield self._counter("vllm:spec_decode_num_drafts", "Steps of texts in which something was drafted.", is_.drafted_steps)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", is_.drafted)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", is_.accepted)
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place in the draft, from 0.",
            labels=["model_name", "position"],
        )
        for position, accepted in enumerate(is_.accepted_at):
            by_place.add_metric([self._model, str(position)], accepted)
        yield by_place
        in_use = GaugeMetricFamily("specjax:draft_in_use", "1: it was used last.", labels=["model_name", "draft"])
        in_use.add_metric([self._model, is_.draft], 1)
        yield in_use
        is_running = float(self._engine.state == "running")
        yield self._gauge("specjax:engine_running", "1: the engine takes requests; 0: it has failed, or is closed.", is_running)
        yield self._gauge("specjax:programs", "Programs that the engine uses, once they are compiled.", is_.programs)
        yield self._gauge("specjax:programs_compiled", "Of those, that are compiled.", is_.compiled)
        if self._sessions is not None:
            taken = "Rows of idle clients that were given to others, until the client's next draft."
            yield self._counter("specjax:client_preemptions", taken, is_.clients.preempted)
            yield from self._of_sessions(self._sessions)

    def _of_sessions(self, are: SessionStatistics) -> Iterator[Metric]:
        yield self._gauge("specjax:client_sessions", "Texts of clients that draft.", are.sessions)
        yield self._gauge("specjax:client_sessions_away", "Of those, without a connection.", are.away)
        yield self._counter("specjax:client_sessions_opened", "Texts of clients that were begun.", are.opened)
        yield self._counter("specjax:client_sessions_resumed", "Times that one went on over another connection.", are.resumes)
        yield self._counter("specjax:client_sessions_dropped", "Lost their row, or were away for too long.", are.dropped)
        yield self._counter("specjax:client_drafts", "Drafts of clients that were verified.", are.rounds)
        yield self._counter("specjax:client_round_trips", "Drafts that followed a verdict.", are.round_trips)
        seconds = "Seconds from a verdict to the next draft: the network there and back, and drafting."
        yield self._counter("specjax:client_round_trip_seconds", seconds, are.round_trip_seconds)
        yield self._counter("specjax:client_received_bytes", "Of frames that clients sent.", are.bytes_up)
        yield self._counter("specjax:client_sent_bytes", "Of frames to clients.", are.bytes_down)

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, about, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(name, about, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
