"""Clients that draft for a target on a server, over several networks, compared with a plain API.

    python -m benchmarks.client_server --target STORIES260K --prompts FILE.jsonl --drafters "MoA,
    TLI 1=DIR" "EAGLE-3=DIR"
    python -m benchmarks.client_server --only bytes        # needs no models

There are five parts. *bytes*: the bytes of a round, by the paper's formula and in our frames (arXiv
2410.03804, table 7). *cut*: how much of the target's text a client writes alone after its
connection is cut. *compression*: the cost of fewer digits. *networks*: one text at a time through a
proxy (`benchmarks.network`), drafted by the client, by the server, not at all, or by the drafter
alone. *clients*: several clients at a time. The output keeps its figures of parts that do not run.

The target is small, so the server waits in each pass (`benchmarks.slow_server`).
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console

import specjax
from benchmarks import client_server_counts as counts
from benchmarks import client_server_tables, decode
from benchmarks.arrivals_pictures import Spread
from benchmarks.decode import prompts_of, read_texts
from benchmarks.network import FIVE_G, FOUR_G, NONE, Conditions, Proxy
from benchmarks.serving_clients import Answer, Request, over_http, tokens_of
from benchmarks.serving_servers import Running, Server
from specjax import client, text
from specjax.client.device import ClientDevice
from specjax.drafters import Drafter
from specjax.drafters.registry import load_drafter
from specjax.errors import InputError
from specjax.models import hub
from specjax.progress import show_waits, track

Part = Literal["bytes", "cut", "compression", "networks", "clients"]

NETWORKS = {"none": NONE, "5G": FIVE_G, "4G": FOUR_G, "100 ms": Conditions(round_trip=0.1)}
"""The networks by name; 5G and 4G are those of the paper."""

PLAIN = "no drafts, API"
"""The name of the target alone, over the API."""


@dataclass(frozen=True)
class ClientServerConfig:
    """Measure clients that draft.

    Attributes:
        only: parts to measure.
        target: directory of the target.
        drafters: "NAME=DIRECTORY" each.
        prompts: JSON lines with "text", on which no drafter is trained; by default the source of
            standard modules.
        python: drafters of the embedded target for part cut, whose prompts are the source of
            standard modules.
        shape: shape of the target in part bytes.
        nodes: drafted tokens of a round in part bytes.
        tokens: tokens that a round adds in part bytes.
        rate: bits per second in part bytes.
        texts: number of texts in parts cut and compression.
        context: tokens of a prompt.
        written: tokens before the cut.
        alone: positions after the cut.
        wait: milliseconds that the server waits in each pass of its target.
        draft: draft shape of the server, and of clients, whose depth follows the network.
        on_server: drafters that also draft on the server.
        new_tokens: tokens of a text in parts networks and clients.
        repeats: texts of each kind; all kinds in turn.
        crowd: drafter of part clients.
        clients: numbers of clients.
        network: network of part clients.
        start_seconds: seconds that a server may take to start.
        output: .json file for the results; if empty, they are only printed.
    """

    only: tuple[Part, ...] = ("bytes", "cut", "compression", "networks", "clients")
    target: str = ""
    drafters: tuple[str, ...] = ()
    prompts: str = ""
    python: tuple[str, ...] = ("EAGLE-3=embedded:eagle3", "draft model=embedded:draft")
    shape: str = "llama-3.1-8b"
    nodes: int = 62
    tokens: int = 4
    rate: float = 20e6
    texts: int = 64
    context: int = 16
    written: int = 50
    alone: int = 48
    wait: float = 25.0
    draft: str = "chain:4"
    on_server: tuple[str, ...] = ("MoA, TLI 1", "EAGLE-3")
    new_tokens: int = 96
    repeats: int = 3
    crowd: str = "MoA, TLI 1"
    clients: tuple[int, ...] = (1, 2, 4, 8)
    network: str = "4G"
    start_seconds: float = 300.0
    output: str = ""


@dataclass
class Models:
    """A target, its drafters, and prompts.

    Attributes:
        target: the model.
        tokenizer: its tokenizer.
        where: the directory of each drafter, by name.
        drafters: the drafters by name.
        prompts: ``[texts, context]``.
    """

    target: specjax.Target
    tokenizer: Any
    where: dict[str, str]
    drafters: dict[str, Drafter]
    prompts: np.ndarray

    @classmethod
    def load(
        cls, target: str, drafters: Sequence[str], prompts: str, texts: int, context: int
    ) -> "Models":
        """Load a target and its ``drafters``, "NAME=DIRECTORY" each."""
        directory = hub.locate(target)
        model, tokenizer = (
            specjax.Target.from_pretrained(directory, dtype=np.float32),
            text.load_tokenizer(directory),
        )
        where = {}
        for drafter in drafters:
            name, equals, place = drafter.partition("=")
            if not equals:
                raise InputError(f"drafters={drafter!r}: write NAME=DIRECTORY")
            where[name] = place
        loaded = {
            name: load_drafter(place, None, model.config, np.float32)
            for name, place in where.items()
        }
        read = [np.asarray(text.encode(tokenizer, sample)) for sample in read_texts(prompts)]
        return cls(model, tokenizer, where, loaded, prompts_of(read, texts, context))


# --- counts ---------------------------------------------------------------------------------------


def measure_bytes(config: ClientServerConfig) -> dict[str, Any]:
    """Compute the bytes of a round."""
    rows = counts.bytes_of_rounds(config.shape, config.nodes, config.tokens, config.rate)
    return {
        "shape": config.shape,
        "nodes": config.nodes,
        "tokens": config.tokens,
        "rate": config.rate,
        "rows": rows,
    }


def measure_cut(config: ClientServerConfig, models: Models) -> dict[str, Any]:
    """Measure the cut on stories and on Python code."""
    python = Models.load("embedded", config.python, "", config.texts, 2 * config.context)
    texts = {"stories": models, "Python": python}
    results = {
        name: counts.text_after_a_cut(
            models_of.target, models_of.drafters, models_of.prompts, config.written, config.alone
        )
        for name, models_of in texts.items()
    }
    return {
        "written": config.written,
        "alone": config.alone,
        "texts": config.texts,
        "rows": results,
    }


def measure_compression(config: ClientServerConfig, models: Models) -> list[dict[str, Any]]:
    """Measure compression on the texts of part networks."""
    return counts.compression(models.target, models.drafters, models.prompts, config.new_tokens)


# --- servers --------------------------------------------------------------------------------------


class Bench:
    """Servers, clients and prompts."""

    def __init__(self, config: ClientServerConfig, models: Models, scratch: Path) -> None:
        self.config, self.models, self.scratch = config, models, scratch

    def start(self, name: str, rows: int) -> Running:
        """Start a server with a drafter, by name; `PLAIN` has none."""
        config = self.config
        drafts = ("none",) if name == PLAIN else ("clients",)
        if name in config.on_server or rows > 1:
            drafts = (config.draft, "clients")
        where = "none" if name == PLAIN else self.models.where[name]
        command = (
            sys.executable,
            "-m",
            "benchmarks.slow_server",
            str(config.wait),
            str(self.busy_file(name)),
            "serve",
        )
        command += (
            "--target",
            config.target,
            "--drafter",
            where,
            "--drafts",
            *(drafts if name != PLAIN else ("none",)),
        )
        command += (
            "--rows",
            str(rows),
            "--client-rows",
            str(rows),
            "--port",
            "{port}",
            "--served-model-name",
            "pair",
        )
        command += ("--warm", "--max-logprobs", "0", "--max-prediction", "0", "--capacity", "256")
        more = {"stream_options": {"include_usage": True}, "ignore_eos": True}
        log = self.scratch / f"{name}.log"
        return Running(Server(command, "pair", more), log, {}, config.start_seconds)

    def busy_file(self, name: str) -> Path:
        """Return the file where the server writes the work of its target."""
        return self.scratch / f"{name}.json"

    def connect(self, name: str, port: int) -> client.Client:
        """Connect a client and compile its programs."""
        connection = client.connect(
            f"ws://127.0.0.1:{port}",
            self.models.where[name],
            self.models.target,
            draft=self.config.draft,
            capacity=256,
            dtype=np.float32,
            tokenizer=self.models.tokenizer,
        )
        return connection


class Stopwatch:
    """A stopwatch for the work of a client's drafter.

    Attributes:
        seconds: seconds so far.
        calls: number of drafts so far.
    """

    def __init__(self, device: ClientDevice) -> None:
        """Measure the calls of a ``device`` from now on."""
        self.seconds, self.calls = 0.0, 0
        for name in ("propose", "append_remote", "append_unverified"):
            setattr(device, name, self._timed(getattr(device, name), name == "propose"))

    def _timed(self, call: Any, is_draft: bool) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += is_draft

        return timed


def prompt_of(bench: Bench, number: int) -> list[int]:
    """Return the n-th prompt."""
    return bench.models.prompts[number % len(bench.models.prompts)].tolist()


def drafted_by_client(
    bench: Bench, drafting: client.Client, prompt: list[int], *, is_offline: bool = False
) -> dict[str, Any]:
    """Generate a text that a client drafts, or that it writes alone."""
    watch = drafting.device.watch  # pyright: ignore[reportAttributeAccessIssue]
    before = watch.seconds
    report = drafting.generate(
        prompt, max_new_tokens=bench.config.new_tokens, eos_token_ids=(), is_offline=is_offline
    )
    count = len(report.provisional_tokens if is_offline else report.tokens)
    run = {
        "tokens_per_second": count / report.seconds,
        "text": report.text,
        "drafting": (watch.seconds - before) / count,
    }
    if is_offline:
        return run
    rounds = report.rounds
    return run | {
        "rounds": rounds,
        "tokens_a_round": report.tokens_a_round,
        "depth": float(np.mean(report.depths)),
        "kept": report.kept / rounds,
        "round_trip": float(np.median(report.round_trips)),
        "up": report.bytes_up / rounds,
        "down": report.bytes_down / rounds,
        "beside": report.seconds - sum(report.round_trips),
    }


def asked_over_api(bench: Bench, port: int, prompts: Sequence[list[int]]) -> list[Answer]:
    """Generate texts on the server, all at once."""
    more = {"stream_options": {"include_usage": True}, "ignore_eos": True}
    ask = over_http(port, "pair", more)
    requests = [Request(prompt, bench.config.new_tokens) for prompt in prompts]  # pyright: ignore[reportArgumentType]

    async def all_of_them() -> list[Answer]:
        answers = [Answer(request, time.perf_counter()) for request in requests]
        await asyncio.gather(*map(ask, answers))
        return answers

    return asyncio.run(all_of_them())


def from_server(bench: Bench, port: int, prompt: list[int]) -> dict[str, Any]:
    """Generate a text on the server."""
    (answer,) = asked_over_api(bench, port, [prompt])
    assert answer.finished is not None
    seconds = answer.finished - answer.sent
    return {
        "tokens_per_second": tokens_of(answer, bench.models.tokenizer) / seconds,
        "text": answer.text,
    }


# --- networks -------------------------------------------------------------------------------------


def measure_networks(bench: Bench) -> dict[str, Any]:
    """Measure every method over every network, in turn."""
    config, runs = bench.config, {}
    with ExitStack() as stack:
        servers, proxies, clients = {}, {}, {}
        for name in track([*bench.models.where, PLAIN], "starting servers"):
            servers[name] = stack.enter_context(bench.start(name, 1))
            servers[name].pause()
            proxies[name] = stack.enter_context(Proxy(servers[name].port))
        for name in bench.models.where:
            clients[name] = bench.connect(name, proxies[name].port)
            clients[name].device.warm_up()
            clients[name].device.watch = Stopwatch(clients[name].device)  # pyright: ignore[reportAttributeAccessIssue]
        for repeat in track(range(-1, config.repeats), "networks"):  # the first time is not counted
            prompt, load = prompt_of(bench, repeat), os.getloadavg()[0]
            texts = {}
            for name, server in servers.items():
                server.resume()
                for network, conditions in NETWORKS.items() if repeat >= 0 else [("none", NONE)]:
                    proxies[name].conditions = replace(conditions)
                    results = {}
                    if name in clients:
                        results[name] = drafted_by_client(bench, clients[name], prompt)
                    if name in (*config.on_server, PLAIN):
                        shown = name if name == PLAIN else f"{name}, on the server"
                        results[shown] = from_server(bench, proxies[name].port, prompt)
                    for method, run in results.items():
                        texts[method, network] = run.pop("text").strip()
                        if repeat >= 0:
                            runs.setdefault(method, {}).setdefault(network, []).append(
                                run | {"load": load}
                            )
                server.pause()
                if name in clients:
                    run = drafted_by_client(bench, clients[name], prompt, is_offline=True)
                    run.pop("text")
                    if repeat >= 0:
                        runs.setdefault(name, {}).setdefault("alone", []).append(
                            run | {"load": load}
                        )
            if wrong := [of for of, text in texts.items() if text != texts[PLAIN, "none"]]:
                raise InputError(
                    f"{wrong}: another text than {PLAIN!r}: {texts[wrong[0]]!r},"
                    f" {texts[PLAIN, 'none']!r}"
                )
    return {
        "round_trips": {name: 1e3 * conditions.round_trip for name, conditions in NETWORKS.items()},
        "methods": {
            method: {network: spreads(all_) for network, all_ in by_network.items()}
            for method, by_network in runs.items()
        },
    }


def spreads(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the spread of each figure."""
    return {name: asdict(Spread.of([run[name] for run in runs])) for name in runs[0]}


# --- clients --------------------------------------------------------------------------------------

WAYS = ("client", "server", "none")
"""The ways to draft."""


def measure_clients(bench: Bench) -> dict[str, Any]:
    """Measure several clients of one server, each with one text, for each way to draft."""
    config, runs = bench.config, {}
    most = max(config.clients)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(bench.start(name, most)) for name in (config.crowd, PLAIN)
        }
        for server in servers.values():
            server.pause()
        proxies = {
            name: stack.enter_context(Proxy(server.port)) for name, server in servers.items()
        }
        clients = [bench.connect(config.crowd, proxies[config.crowd].port) for _ in range(most)]
        clients[0].device.warm_up()
        for repeat in track(range(-1, config.repeats), "clients"):
            for way in WAYS:
                name = PLAIN if way == "none" else config.crowd
                servers[name].resume()
                for count in config.clients if repeat >= 0 else config.clients[-1:]:
                    proxies[name].conditions = replace(NETWORKS[config.network])
                    prompts = [prompt_of(bench, repeat * most + index) for index in range(count)]
                    before, processor = busy(bench, name), time.process_time()
                    started = time.perf_counter()
                    if way == "client":
                        tokens = all_at_once(bench, clients[:count], prompts)
                    else:
                        answers = asked_over_api(bench, proxies[name].port, prompts)
                        tokens = sum(
                            tokens_of(answer, bench.models.tokenizer) for answer in answers
                        )
                    seconds, after = time.perf_counter() - started, busy(bench, name)
                    run = {
                        "tokens_per_second": tokens / seconds,
                        "tokens_a_busy_second": tokens / (after["busy"] - before["busy"]),
                        "tokens_a_pass": tokens / (after["passes"] - before["passes"]),
                        "busy": (after["busy"] - before["busy"]) / seconds,
                        "cores": (time.process_time() - processor) / seconds,
                    }
                    if repeat >= 0:
                        runs.setdefault(way, {}).setdefault(str(count), []).append(run)
                servers[name].pause()
    return {
        "drafter": config.crowd,
        "network": config.network,
        "ways": {
            way: {count: spreads(all_) for count, all_ in by_count.items()}
            for way, by_count in runs.items()
        },
    }


def busy(bench: Bench, name: str) -> dict[str, float]:
    """Return the work of a server's target so far."""
    return json.loads(bench.busy_file(name).read_text())


def all_at_once(
    bench: Bench, clients: Sequence[client.Client], prompts: Sequence[list[int]]
) -> int:
    """Generate a text per client in threads, and return the number of tokens."""
    counts: list[int] = []

    def write(connection: client.Client, prompt: list[int]) -> None:
        counts.append(
            len(
                connection.generate(
                    prompt, max_new_tokens=bench.config.new_tokens, eos_token_ids=()
                ).tokens
            )
        )

    threads = [
        threading.Thread(target=write, args=pair) for pair in zip(clients, prompts, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(counts) < len(clients):
        raise InputError("clients: one of them has failed; its error is above")
    return sum(counts)


# --- all of it ------------------------------------------------------------------------------------


@contextmanager
def bench_of(config: ClientServerConfig, models: Models) -> Iterator[Bench]:
    """Yield a bench with a directory for the servers' logs."""
    with tempfile.TemporaryDirectory(prefix="specjax-clients-") as scratch:
        yield Bench(config, models, Path(scratch))


def run(config: ClientServerConfig) -> dict[str, Any]:
    """Run the parts, and return their results with earlier ones in the output."""
    check(config)
    path = Path(config.output) if config.output else None
    results: dict[str, Any] = (
        json.loads(path.read_text()) if path is not None and path.exists() else {}
    )

    def done(part: str, part_results: Any) -> None:
        results[part] = {
            "machine": decode.machine(),
            "settings": settings_of(config),
            "found": part_results,
        }
        if path is not None:
            decode.write(results, path)

    if "bytes" in config.only:
        done("bytes", measure_bytes(config))
    if set(config.only) == {"bytes"}:
        return results
    models = Models.load(
        config.target, config.drafters, config.prompts, config.texts, config.context
    )
    if "cut" in config.only:
        done("cut", measure_cut(config, models))
    if "compression" in config.only:
        done("compression", measure_compression(config, models))
    with bench_of(config, models) as bench:
        if "networks" in config.only:
            done("networks", measure_networks(bench))
        if "clients" in config.only:
            done("clients", measure_clients(bench))
    return results


PLACES = ("only", "target", "drafters", "prompts", "python", "output", "start_seconds")
"""The settings that are specific to one machine."""


def settings_of(config: ClientServerConfig) -> dict[str, Any]:
    """Return the settings on which the figures depend."""
    return {name: value for name, value in asdict(config).items() if name not in PLACES}


def check(config: ClientServerConfig) -> None:
    """Refuse invalid options."""
    for name in (
        "nodes",
        "tokens",
        "texts",
        "context",
        "written",
        "alone",
        "new_tokens",
        "repeats",
        "rate",
    ):
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)}: must be at least 1")
    if config.network not in NETWORKS:
        raise InputError(f"network={config.network!r}: give one of {', '.join(NETWORKS)}")
    if set(config.only) != {"bytes"} and not (config.target and config.drafters):
        raise InputError("target and drafters: give both, or --only bytes")
    names = [drafter.partition("=")[0] for drafter in config.drafters]
    if {"networks", "clients"} & set(config.only):
        for name in (*config.on_server, config.crowd):
            if name not in names:
                raise InputError(
                    f"drafters: has no {name!r}, which on_server or crowd names; there are"
                    f" {', '.join(names)}"
                )


def main(config: ClientServerConfig) -> None:
    """Measure, and print the tables."""
    # No server outlives this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    client_server_tables.show(run(config), Console(width=150))


if __name__ == "__main__":
    show_waits()
    try:
        main(tyro.cli(ClientServerConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
