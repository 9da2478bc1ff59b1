"""The metrics for Prometheus, under vLLM's names, so that its dashboards work.

The engine's counters are read at each scrape. The times of a text are those at which the engine
delivered its pieces. They are counted a few times a second and at each scrape, so a client that
reads slowly does not make the engine look slow.
"""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specjax.serving.handle import Handle
from specjax.serving.row_kinds import CONTEXTS, REGIONS
from specjax.serving.sessions import SessionStatistics
from specjax.serving.totals import KindCounts

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_LOOK_SECONDS = 0.2
"""The seconds after which the new pieces of a growing text are counted."""

_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


class Metrics:
    """The metrics of one server.

    Attributes:
        registry: the registry of this server alone.
    """

    def __init__(self, engine: Any, model: str, sessions: SessionStatistics | None = None) -> None:
        """Register the metrics.

        Args:
            engine: the engine.
            model: the name of the model, for the label.
            sessions: the counters of the sessions of clients that draft; None: there are none.
        """
        self.registry = CollectorRegistry()
        self._label = {"model_name": model}
        self._watching: set[asyncio.Task[None]] = set()
        self._texts: set[_Text] = set()
        self.registry.register(_EngineCollector(engine, model, sessions))  # pyright: ignore[reportArgumentType]
        names = ["model_name"]
        self._first = self._histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token."
        )
        self._between = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens. Tokens that are delivered together share the seconds since the"
            " previous ones.",
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the request to the end of its text."
        )
        self._finished = Counter(
            "vllm:request_success",
            "Texts that have ended.",
            [*names, "finished_reason"],
            registry=self.registry,
        )
        # Each reason is exported from the start, as 0, so that rates are right for its first text.
        for reason in _FINISHED.values():
            self._finished.labels(model, reason)
        self._prompt = Counter(
            "vllm:prompt_tokens", "Tokens of prompts.", names, registry=self.registry
        ).labels(model)
        self._generated = Counter(
            "vllm:generation_tokens", "Generated tokens.", names, registry=self.registry
        ).labels(model)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(
            name, about, ["model_name"], buckets=_SECONDS, registry=self.registry
        ).labels(**self._label)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format, with what has come up to now.

        It runs in the event loop, as all that counts texts.
        """
        for text in list(self._texts):
            self._look(text)
        return generate_latest(self.registry)

    def watch(self, handle: Handle, prompt_tokens: int) -> None:
        """Observe a text until it ends, and count ``prompt_tokens`` when it begins.

        It needs a running event loop.
        """
        text = _Text(handle, prompt_tokens)
        self._texts.add(text)
        task = asyncio.get_running_loop().create_task(self._watch(text))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(self, text: "_Text") -> None:
        # Not at each piece: the times are exact all the same, and a task that is woken for each
        # token would cost more than the token's JSON.
        while text in self._texts:
            self._look(text)
            await asyncio.sleep(_LOOK_SECONDS)

    def _look(self, text: "_Text") -> None:
        """Count what has come of a text."""
        handle = text.handle
        news, is_over = handle.news(text.count)
        text.count += len(news)
        if news:
            # The first piece may have no tokens: that of a request with max_tokens=0.
            self._prompt.inc(text.prompt_tokens)
            self._generated.inc(sum(len(piece.tokens) for _, piece in news))
            text.prompt_tokens = 0
        for delivered, piece in news:
            if not piece.tokens:
                continue
            if not text.before:
                first = handle.times.first_token or delivered
                self._first.observe(first - handle.times.submitted)
            else:
                seconds = (delivered - text.before) / len(piece.tokens)
                for _ in piece.tokens:
                    self._between.observe(seconds)
            text.before = delivered
        if is_over:
            self._texts.discard(text)
            self._count_end(handle)

    def _count_end(self, handle: Handle) -> None:
        self._finished.labels(
            self._label["model_name"], _FINISHED[handle.finish_reason or "error"]
        ).inc()
        if handle.finish_reason in ("stop", "length") and handle.times.finished is not None:
            self._whole.observe(handle.times.finished - handle.times.submitted)


@dataclass(eq=False)
class _Text:
    """A text that is observed.

    Attributes:
        handle: its handle.
        prompt_tokens: the tokens of its prompt that are not counted yet.
        count: the number of pieces that were counted.
        before: when the newest of them with tokens was delivered; 0 if there is none.
    """

    handle: Handle
    prompt_tokens: int
    count: int = 0
    before: float = 0.0


class _EngineCollector:
    """The collector that reads an engine's statistics at each scrape."""

    def __init__(self, engine: Any, model: str, sessions: SessionStatistics | None) -> None:
        self._engine, self._model, self._sessions = engine, model, sessions

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        statistics = self._engine.statistics
        yield self._gauge(
            "vllm:num_requests_running", "Texts that are being generated.", statistics.running
        )
        yield self._gauge(
            "vllm:num_requests_waiting", "Requests that wait for a row.", statistics.waiting
        )
        usage = 1 - statistics.free_pages / statistics.pages
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the pages in use, 1 is all.", usage)
        yield self._counter("vllm:num_preemptions", "Preemptions of texts.", statistics.preemptions)
        queries = statistics.prompt_tokens_read + statistics.prompt_tokens_shared
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries
        )
        yield self._counter(
            "vllm:prefix_cache_hits",
            "Prompt tokens found in that cache.",
            statistics.prompt_tokens_shared,
        )
        yield self._counter(
            "specjax:tokens_reread",
            "Tokens of ended texts, read once more for a chat's next turn.",
            statistics.tokens_reread,
        )
        yield self._counter(
            "vllm:spec_decode_num_drafts",
            "Steps with a draft, counted per text.",
            statistics.drafted_steps,
        )
        yield self._counter(
            "vllm:spec_decode_num_draft_tokens", "Drafted tokens.", statistics.drafted
        )
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens",
            "Drafted tokens that were accepted.",
            statistics.accepted,
        )
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their position in the draft, from 0.",
            labels=["model_name", "position"],
        )
        for position, accepted in enumerate(statistics.accepted_at):
            by_position.add_metric([self._model, str(position)], accepted)
        yield by_position
        yield from self._collect_parts(statistics)
        yield from self._collect_kinds(statistics)
        in_use = GaugeMetricFamily(
            "specjax:draft_in_use", "1: it was used last.", labels=["model_name", "draft"]
        )
        in_use.add_metric([self._model, statistics.draft], 1)
        yield in_use
        is_running = float(self._engine.state == "running")
        yield self._gauge(
            "specjax:engine_running",
            "1: the engine takes requests; 0: it has failed, or is closed.",
            is_running,
        )
        yield self._gauge(
            "specjax:programs", "Programs of the engine, compiled or not.", statistics.programs
        )
        yield self._gauge(
            "specjax:programs_compiled", "Programs that are compiled.", statistics.compiled
        )
        yield from self._collect_grammars(statistics)
        if self._sessions is not None:
            suspended = "Times that an idle client's row was given to another request."
            yield self._counter(
                "specjax:client_preemptions", suspended, statistics.clients.preempted
            )
            yield from self._collect_sessions(self._sessions)

    def _collect_parts(self, statistics: Any) -> Iterator[Metric]:
        """Yield the counters by part of a union. A drafter without parts has no series."""
        families = {
            "drafted": ("draft_tokens_per_part", "Drafted tokens that the part offered."),
            "accepted": ("accepted_tokens_per_part", "Accepted tokens that the part offered."),
            "accepted_only": (
                "accepted_only_tokens_per_part",
                "Accepted tokens that the part offered, and no other part.",
            ),
        }
        parts = statistics.parts
        names = _numbered([part.name for part in parts])
        for field, (name, about) in families.items():
            family = CounterMetricFamily(
                f"specjax:spec_decode_num_{name}", about, labels=["model_name", "part"]
            )
            for label, part in zip(names, parts, strict=True):
                family.add_metric([self._model, label], getattr(part, field))
            yield family

    def _collect_kinds(self, statistics: Any) -> Iterator[Metric]:
        """Yield the counters by region and range of context lengths, also those that are 0."""
        families = {
            "steps": ("specjax:steps", "Passes of the target, counted per text."),
            "generated": ("specjax:generation_tokens", "Generated tokens."),
            "drafted_steps": ("specjax:spec_decode_num_drafts", "Steps with a draft."),
            "drafted": ("specjax:spec_decode_num_draft_tokens", "Drafted tokens."),
            "accepted": ("specjax:spec_decode_num_accepted_tokens", "Accepted drafted tokens."),
        }
        for field, (name, about) in families.items():
            labels = ["model_name", "region", "context_length"]
            family = CounterMetricFamily(
                name, f"{about} By region and largest context length.", labels=labels
            )
            for region, context in itertools.product(REGIONS, CONTEXTS):
                counts = statistics.kinds.get((region, context), KindCounts())
                family.add_metric([self._model, region, context], getattr(counts, field))
            yield family

    def _collect_grammars(self, statistics: Any) -> Iterator[Metric]:
        forced = "Tokens that grammars forced, drafted without a drafter."
        yield self._counter("specjax:grammar_forced_tokens", forced, statistics.forced_tokens)
        illegal = "Drafted tokens that their grammar did not allow."
        yield self._counter("specjax:grammar_illegal_tokens", illegal, statistics.illegal_nodes)
        seconds = "Seconds of making masks of legal tokens."
        yield self._counter("specjax:grammar_mask_seconds", seconds, statistics.mask_seconds)
        restored = "Times that a text left its grammar in a call without masks, and was put back."
        yield self._counter("specjax:grammar_restored_rows", restored, statistics.restored_rows)

    def _collect_sessions(self, statistics: SessionStatistics) -> Iterator[Metric]:
        yield self._gauge(
            "specjax:client_sessions", "Sessions of clients that draft.", statistics.sessions
        )
        yield self._gauge(
            "specjax:client_sessions_away", "Sessions without a connection.", statistics.away
        )
        yield self._counter(
            "specjax:client_sessions_opened", "Sessions that were opened.", statistics.opened
        )
        yield self._counter(
            "specjax:client_sessions_resumed",
            "Sessions resumed on another connection.",
            statistics.resumes,
        )
        yield self._counter(
            "specjax:client_sessions_dropped", "Sessions that the server ended.", statistics.dropped
        )
        yield self._counter(
            "specjax:client_drafts", "Drafts of clients that were verified.", statistics.rounds
        )
        yield self._counter(
            "specjax:client_round_trips", "Drafts that followed a verdict.", statistics.round_trips
        )
        seconds = (
            "Seconds from a verdict to the next draft: the network in both directions, and"
            " drafting."
        )
        yield self._counter(
            "specjax:client_round_trip_seconds", seconds, statistics.round_trip_seconds
        )
        yield self._counter(
            "specjax:client_received_bytes", "Bytes of frames from clients.", statistics.bytes_up
        )
        yield self._counter(
            "specjax:client_sent_bytes", "Bytes of frames to clients.", statistics.bytes_down
        )

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, about, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(name, about, labels=["model_name"])
        family.add_metric([self._model], value)
        return family


def _numbered(names: Sequence[str]) -> list[str]:
    """Return ``names``; one that is there before has a number behind it, so that all differ."""
    earlier = [names[:place].count(name) for place, name in enumerate(names)]
    return [
        f"{name} {count + 1}" if count else name for name, count in zip(names, earlier, strict=True)
    ]
