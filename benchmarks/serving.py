"""Comparison of servers on the same weights and requests: ours, `transformers serve`, llama.cpp's.

    python -m benchmarks.serving --output serving.json               # ours and transformers
    python -m benchmarks.serving --llama-python PYTHON --llama-server PROGRAM --seconds 30 --repeats
    5
    python -m benchmarks.serving --parts http prediction

Our server runs with and without drafts. There are three parts. *clients*: several clients at a
time, each of which sends its next request when its last one has ended. *http*: the same requests
over HTTP and directly to the engine, in one process. *prediction*: a long text with and without a
predicted output. Servers run one at a time, in turn over all repeats; the others are stopped
meanwhile.
"""

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console

import specjax
from benchmarks import decode, serving_models, serving_servers, serving_tables
from benchmarks.arrivals_pictures import Spread
from benchmarks.serving_clients import (
    Answer,
    Ask,
    Request,
    figures,
    for_seconds,
    over_http,
    tokens_of,
    work_through,
)
from benchmarks.serving_servers import Running, Server
from specjax import text
from specjax.errors import InputError
from specjax.progress import show_waits, track
from specjax.reports import pictures

Part = Literal["clients", "http", "prediction"]

EAGLE3, PLAIN = "specjax, EAGLE-3", "specjax, no drafts"
"""The names of our two servers."""


@dataclass(frozen=True)
class ServingConfig:
    """Measure servers.

    Attributes:
        parts: parts to measure.
        inflate: hidden size, MLP size and layers to which the embedded target is padded, with the
            same outputs; 0 0 0 does not pad it.
        transformers: how `transformers serve` runs: one text at a time, or with continuous
            batching; "none" leaves it out.
        llama_python: interpreter with llama-cpp-python[server]; empty: it is left out.
        llama_server: llama.cpp's own server; empty: it is left out.
        rows: rows of our server and of llama.cpp's own.
        drafts: draft shapes from which our server with EAGLE-3 chooses by load; by default the
            engine's own choice.
        clients: numbers of clients, one case each.
        sampled_clients: numbers of clients whose requests are sampled and not greedy.
        temperature: temperature of sampled requests.
        context: approximate tokens of a prompt.
        shortest: minimum number of new tokens of a request.
        longest: maximum number of new tokens of a request.
        seconds: duration of a run; longer, up to `patience`, if a client has had no answer yet.
        patience: maximum duration of a run, see `seconds`.
        repeats: repeats of every measurement.
        http_requests: requests of part http, for as many clients as there are rows.
        http_repeats: repeats of part http.
        prediction_tokens: tokens of the long text of part prediction.
        prediction_repeats: repeats of part prediction.
        positions: positions of the written models, and so the longest text; they were trained with
            1,024.
        agreement: number of prompts whose greedy texts all servers must agree on.
        scratch: directory for models, compiled programs and logs, kept for the next run; empty: a
            temporary one.
        start_seconds: seconds in which a server must have started.
        output: JSON file for the results.
        plot: picture to write, of part clients.
    """

    parts: tuple[Part, ...] = ("clients", "http", "prediction")
    inflate: tuple[int, int, int] = (576, 1792, 15)
    transformers: Literal["sequential", "continuous", "none"] = "continuous"
    llama_python: str = ""
    llama_server: str = ""
    rows: int = 8
    drafts: tuple[str, ...] = ()
    clients: tuple[int, ...] = (1, 4, 8)
    sampled_clients: tuple[int, ...] = (8,)
    temperature: float = 0.8
    context: int = 64
    shortest: int = 64
    longest: int = 128
    seconds: float = 6.0
    patience: float = 30.0
    repeats: int = 3
    http_requests: int = 24
    http_repeats: int = 6
    prediction_tokens: int = 2500
    prediction_repeats: int = 2
    positions: int = 4096
    agreement: int = 4
    scratch: str = ""
    start_seconds: float = 300.0
    output: str = ""
    plot: str = ""


@dataclass(frozen=True)
class Bench:
    """The settings, the directories of the models, and their tokenizer."""

    config: ServingConfig
    directory: Path
    tokenizer: Any

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of all servers: with a compilation cache, and offline."""
        cache = str(self.directory / "compiled")
        return {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            "HF_HUB_OFFLINE": "1",
        }

    def start(self, name: str, server: Server) -> Running:
        """Start a server, and wait until it answers."""
        log = (
            self.directory
            / f"{''.join(letter if letter.isalnum() else '_' for letter in name)}.log"
        )
        return Running(server, log, self.environment, self.config.start_seconds)


def requests_of(bench: Bench, temperature: float, seed: int) -> Iterator[Request]:
    """Yield requests without end: lines of modules of the standard library, to be continued."""
    config, random = bench.config, np.random.default_rng(seed)
    modules = [module.splitlines(keepends=True) for module in decode.read_texts("")]
    while True:
        lines = modules[random.integers(len(modules))]
        # A line has at least one token.
        start = end = int(random.integers(len(lines) - config.context))
        tokens = 0
        while tokens < config.context and end < len(lines):
            tokens += len(bench.tokenizer.encode(lines[end], add_special_tokens=False))
            end += 1
        most = int(random.integers(config.shortest, config.longest + 1))
        yield Request(
            "".join(lines[start:end]), most, temperature, seed=int(random.integers(2**31))
        )


def first_of(requests: Iterator[Request], count: int) -> list[Request]:
    """Return the first requests."""
    return [next(requests) for _ in range(count)]


def servers_of(config: ServingConfig, directory: Path) -> dict[str, Server]:
    """Return the servers to measure, by name."""
    eagle3 = f"eagle3:{directory / 'eagle3'}"
    servers = {
        EAGLE3: serving_servers.ours(
            directory, eagle3, config.rows, ("--drafts", *config.drafts) if config.drafts else ()
        ),
        PLAIN: serving_servers.ours(directory, "none", config.rows),
    }
    if "clients" not in config.parts:
        return servers
    # Prompts end with a line, and may be longer than config.context.
    context = 2 * (config.context + config.longest)
    if config.transformers != "none":
        continuous = config.transformers == "continuous"
        servers["transformers"] = serving_servers.transformers(
            directory, continuous, config.rows * context
        )
    if config.llama_server:
        servers["llama.cpp"] = serving_servers.llama_server(
            directory, config.llama_server, config.rows, context
        )
    if config.llama_python:
        servers["llama-cpp-python"] = serving_servers.llama_cpp_python(
            directory, config.llama_python, context
        )
    return servers


def asks(running: Running) -> Ask:
    """Return a function that sends requests to a server."""
    return over_http(running.port, running.server.model, running.server.more)


# --- clients --------------------------------------------------------------------------------------


def check_agreement(bench: Bench, running: Mapping[str, Running]) -> dict[str, Any]:
    """Check that the greedy texts of all servers are those of `specjax.generate`.

    If one differs, the two most likely tokens at the first difference must be nearly as likely, so
    that rounding explains it.

    Raises:
        InputError: the server has a different model.
    """
    config = bench.config
    generate = specjax.load(
        str(bench.directory / "target"), dtype="float32", generation_config=None
    )
    requests = [
        replace(request, max_tokens=config.shortest)
        for request in first_of(requests_of(bench, 0.0, seed=1), config.agreement)
    ]
    expected = generate([request.prompt for request in requests], max_new_tokens=config.shortest)
    agreement = {}
    for name, server in running.items():
        server.resume()
        answers = asyncio.run(work_through(asks(server), requests, 1))
        server.pause()
        margins = [
            margin_at_difference(generate, answer, list(expectation.tokens))
            for answer, expectation in zip(answers, expected, strict=True)
            if answer.text != expectation.text
        ]
        agreement[name] = {
            "prompts": len(requests),
            "same": len(requests) - len(margins),
            "margins": margins,
        }
        if max(margins, default=0.0) > 1e-3:
            raise InputError(
                f"{name}: its greedy texts are not this model's: the logits' margins are {margins}"
            )
    return agreement


def margin_at_difference(
    generate: specjax.TextGenerator, answer: Answer, tokens: list[int]
) -> float:
    """Return the margin of the most likely token's logit where a text first differs."""
    decoded = [generate.tokenizer.decode(tokens[: i + 1]) for i in range(len(tokens))]
    same = next(
        (i for i, part in enumerate(decoded) if not answer.text.startswith(part)), len(tokens) - 1
    )
    prefix = [*generate.encode(answer.request.prompt), *tokens[:same]]
    logits = np.asarray(generate.target.forward(np.array([prefix]))[0].logits)[0, -1]
    second, first = np.sort(logits)[-2:]
    return float(first - second)


def measure_clients(bench: Bench, running: Mapping[str, Running]) -> list[dict[str, Any]]:
    """Measure every server at every number of clients, in turn."""
    config = bench.config
    cases = [(0.0, clients) for clients in config.clients]
    cases += [(config.temperature, clients) for clients in config.sampled_clients]
    runs: dict[tuple[float, int, str], list[dict[str, float]]] = {}
    for repeat in track(range(config.repeats), "clients"):
        for name, server in running.items():
            server.resume()
            for number, (temperature, clients) in enumerate(cases):
                if temperature and serving_servers.CONTINUOUS in server.server.command:
                    continue
                requests = requests_of(bench, temperature, seed=1000 * (repeat + 1) + number)
                limits = config.seconds, config.patience
                answers = asyncio.run(for_seconds(asks(server), requests, clients, *limits))
                run = figures(answers, time.perf_counter(), bench.tokenizer)
                runs.setdefault((temperature, clients, name), []).append(run)
                # When this is answered, those that were cut short are over.
                asyncio.run(work_through(asks(server), [Request("import os", 1)], 1))
            server.pause()
    return [
        {
            "temperature": temperature,
            "clients": clients,
            "servers": {
                name: spreads(all_)
                for (its_temperature, its_clients, name), all_ in runs.items()
                if (its_temperature, its_clients) == (temperature, clients)
            },
        }
        for temperature, clients in cases
    ]


def spreads(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the spread of each figure that some of the runs have."""
    names = dict.fromkeys(figure for run in runs for figure in run)
    return {name: asdict(Spread.of([run[name] for run in runs if name in run])) for name in names}


# --- what HTTP costs ------------------------------------------------------------------------------


def measure_http(bench: Bench) -> dict[str, Any]:
    """Measure the same requests over HTTP and directly in the same engine, in turn.

    There are no drafts, because the engine's choice of shapes would change between the two. The
    prompts are prefilled beforehand, so that neither way prefills them for the other.
    """
    config = bench.config
    server = servers_of(config, bench.directory)[PLAIN]
    command = [
        part if part != "specjax" else "benchmarks.serving_in_process"
        for part in server.command
        if part != "serve"
    ]
    server = Server(tuple(command), server.model, server.more, server.about)
    log = bench.directory / "in_process.log"
    with Running(server, log, bench.environment, config.start_seconds, talks=True) as running:
        seconds: dict[str, list[float]] = {"engine": [], "http": []}
        tokens, same = [], True
        # The first repeat is not counted.
        for repeat in track(range(-1, config.http_repeats), "what HTTP costs"):
            requests = first_of(
                requests_of(bench, 0.0, seed=repeat + 1_000_001), config.http_requests
            )
            prompts = [asdict(replace(request, max_tokens=1)) for request in requests]
            running.tell({"requests": prompts, "clients": config.rows})
            order = ("engine", "http") if repeat % 2 else ("http", "engine")
            texts, spent = {}, {}
            for way in order:
                if way == "http":
                    began = time.perf_counter()
                    answers = asyncio.run(work_through(asks(running), requests, config.rows))
                    spent[way], texts[way] = (
                        time.perf_counter() - began,
                        [answer.text for answer in answers],
                    )
                    count = sum(tokens_of(answer, bench.tokenizer) for answer in answers)
                else:
                    answer = running.tell(
                        {
                            "requests": [asdict(request) for request in requests],
                            "clients": config.rows,
                        }
                    )
                    spent[way], texts[way] = answer["seconds"], answer["texts"]
            same = same and texts["http"] == texts["engine"]
            if repeat >= 0:
                tokens.append(count)
                for way, spent_seconds in spent.items():
                    seconds[way].append(spent_seconds)
    ratios = [
        engine / http for engine, http in zip(seconds["engine"], seconds["http"], strict=True)
    ]
    return {
        "clients": config.rows,
        "tokens_per_second": {
            way: asdict(
                Spread.of([count / total for count, total in zip(tokens, all_, strict=True)])
            )
            for way, all_ in seconds.items()
        },
        "http_over_engine": asdict(Spread.of(ratios)),
        "same_texts": same,
    }


# --- predicted outputs ----------------------------------------------------------------------------


def measure_prediction(bench: Bench, running: Mapping[str, Running]) -> dict[str, Any]:
    """Measure a long sampled text, and the same text with a prediction that differs in some lines.

    The embedded target does not follow instructions. So that it writes the edited file, that file
    is its own text for the seed; and the prediction, the file before the edit, is made from it.
    """
    config = bench.config
    prompt = first_of(requests_of(bench, 0.0, seed=2), 1)[0].prompt
    plain = Request(
        prompt, config.prediction_tokens, config.temperature, seed=3, more={"ignore_eos": True}
    )
    runs: dict[str, dict[str, list[float]]] = {
        name: {"without": [], "with": []} for name in running
    }
    texts, usages = [], {}
    for _ in track(range(config.prediction_repeats), "predicted outputs"):
        for name, server in running.items():
            server.resume()
            for way in ("without", "with"):
                more = {**plain.more}
                if way == "with":
                    more["prediction"] = {
                        "type": "content",
                        "content": with_changed_lines(texts[0]),
                    }
                request = Request(prompt, plain.max_tokens, plain.temperature, plain.seed, more)
                answer = asyncio.run(work_through(asks(server), [request], 1))[0]
                texts.append(answer.text)
                runs[name][way].append(
                    tokens_of(answer, bench.tokenizer) / (answer.finished - answer.sent)
                )  # pyright: ignore
                usages[name] = (answer.usage or {}).get("completion_tokens_details")
            server.pause()
    return {
        "tokens": config.prediction_tokens,
        "lines": texts[0].count("\n"),
        "same_text": float(np.mean([text == texts[0] for text in texts])),
        "servers": {
            name: {
                "tokens_per_second": {way: asdict(Spread.of(all_)) for way, all_ in ways.items()},
                "gain": median(b / a for a, b in zip(ways["without"], ways["with"], strict=True)),
                "usage": usages[name],
            }
            for name, ways in runs.items()
        },
    }


def with_changed_lines(original: str, every: int = 10) -> str:
    """Return a text with every tenth line replaced."""
    lines = original.split("\n")
    for i in range(every - 1, len(lines), every):
        indent = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
        lines[i] = f"{indent}changed_{i} = None"
    return "\n".join(lines)


# --- all of it ------------------------------------------------------------------------------------


def run(config: ServingConfig) -> dict[str, Any]:
    """Run all parts, and return the results as they are written to JSON."""
    check(config)
    with ExitStack() as stack:
        scratch = config.scratch or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="specjax-serving-")
        )
        directory = Path(scratch).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        parameters = serving_models.write_pair(directory, config.inflate, config.positions)
        servers = servers_of(config, directory)
        if config.llama_python or config.llama_server:
            serving_models.write_gguf(directory / "target", directory / "target.gguf")
        bench = Bench(config, directory, text.load_tokenizer(directory / "target"))
        results: dict[str, Any] = {
            "machine": decode.machine() | {"llama-cpp-python": llama_version(config.llama_python)},
            "settings": {
                name: value for name, value in asdict(config).items() if name not in PLACES
            },
            "parameters": {"target": parameters},
            "servers": {name: server.about for name, server in servers.items()},
        }

        def done(part: str, part_results: Any) -> None:
            results[part] = part_results
            if config.output:
                decode.write(results, Path(config.output))

        if {"clients", "prediction"} & set(config.parts):
            running = {}
            for name, server in servers.items():
                running[name] = stack.enter_context(bench.start(name, server))
                running[name].pause()
            if "clients" in config.parts:
                done("agreement", check_agreement(bench, running))
                done("clients", measure_clients(bench, running))
            if "prediction" in config.parts:
                done(
                    "prediction",
                    measure_prediction(bench, {name: running[name] for name in (EAGLE3, PLAIN)}),
                )
        if "http" in config.parts:
            done("http", measure_http(bench))
    return results


PLACES = ("llama_python", "llama_server", "scratch", "output", "plot")
"""The settings with paths of one machine."""


def llama_version(python: str) -> str | None:
    """Return the version of llama-cpp-python in its interpreter."""
    if not python:
        return None
    command = [
        python,
        "-c",
        "from importlib.metadata import version; print(version('llama-cpp-python'))",
    ]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise InputError(
            f"llama_python={python!r}: llama-cpp-python is not installed there"
        ) from None


def check(config: ServingConfig) -> None:
    """Refuse invalid options."""
    for name in (
        "rows",
        "context",
        "shortest",
        "repeats",
        "http_requests",
        "http_repeats",
        "prediction_repeats",
        "agreement",
    ):
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)}: must be at least 1")
    if min((*config.clients, *config.sampled_clients), default=0) < 1:
        raise InputError(
            f"clients={config.clients}, sampled_clients={config.sampled_clients}: must be at least"
            " 1 each"
        )
    if config.longest < config.shortest:
        raise InputError(f"longest={config.longest}: must be at least shortest={config.shortest}")
    if not 0 < config.seconds <= config.patience:
        raise InputError(
            f"seconds={config.seconds:g}: must be above 0, and at most patience={config.patience:g}"
        )
    llama_version(config.llama_python)
    if config.plot:
        pictures.check_path("plot", config.plot)
        if "clients" not in config.parts:
            raise InputError(
                f"plot={config.plot!r}: is a picture of part clients, which is not in"
                f" parts={config.parts}"
            )


def main(config: ServingConfig) -> None:
    """Measure, print the tables and draw the picture."""
    # No server outlives this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    results = run(config)
    serving_tables.show(results, Console(width=150))
    if config.plot:
        pictures.save(serving_tables.clients_picture(results), "plot", Path(config.plot))


if __name__ == "__main__":
    show_waits()
    try:
        main(tyro.cli(ServingConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
