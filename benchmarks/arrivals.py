"""Requests that arrive over time: continuous and static batching, and draft shapes by load.

    python -m benchmarks.arrivals --output arrivals.json    # the embedded pair, its target inflated
    to about 90M
    python -m benchmarks.arrivals --parts batches --requests 64 --plot-rows rows.png
    python -m benchmarks.arrivals --parts rates --seconds 20 --repeats 1 --plot-rates rates.png

There are four parts. *batches*: many requests wait, with texts of very different lengths. The
engine gives a free row to the next request; static batches run until their longest text ends.
*rates*: requests arrive at random, from few to more than can be served. One engine never drafts,
one always drafts, and one decides by load. *prefix*: requests with a common prefix. *first-token*:
the time to the first token if a row is free. All runs of a part are interleaved.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

import specjax
from benchmarks import arrivals_tables, decode
from benchmarks.arrivals_pictures import Spread, Stay, stays_of
from specjax import text
from specjax.demo import OnInflated, inflate
from specjax.drafters import Drafter
from specjax.drafters.registry import load_drafter
from specjax.drafts.names import as_shape
from specjax.errors import InputError
from specjax.models import hub, params
from specjax.models.transformer import Target
from specjax.reports import pictures
from specjax.serving import Engine
from specjax.serving.scheduler import Scheduler

Part = Literal["batches", "rates", "prefix", "first-token"]

BY_LOAD = "by load"
"""The tokens of a prompt after the common prefix, and the new tokens, in part prefix."""


@dataclass(frozen=True)
class ArrivalsConfig:
    """Measure serving.

    Attributes:
        target: directory or hub id of the target.
        drafter: as for `specjax generate`; "none" measures only plain decoding.
        inflate: hidden size, MLP size and layers to which the target is padded, with the same
            outputs; 0 0 0 does not pad it.
        prompts: JSON lines with a "text" each; by default modules of the standard library, on which
            the embedded pair is trained.
        parts: parts to measure.
        rows: number of rows.
        context: tokens of a prompt.
        shortest: minimum number of new tokens. The logarithm of the length is uniform between this
            and ``longest``.
        longest: maximum number of new tokens.
        draft: the fixed draft shape.
        drafts: draft shapes from which the engine may choose, besides plain decoding.
        requests: number of requests that wait at the start of part batches.
        shares: the arrival rates of part rates, as shares of the rate that plain decoding reaches
            with all rows in use.
        seconds: duration of the arrivals at each rate.
        prefix: tokens of the common prefix in part prefix.
        sharing: number of requests with this prefix.
        repeats: repeats of every measurement.
        steps: maximum number of steps between two looks at the queue.
        dtype: data type of all weights, float32 or bfloat16.
        output: JSON file for the results.
        plot_rows: picture to write, of the rows over time in part batches.
        plot_rates: picture to write, of part rates.
    """

    target: str = "embedded"
    drafter: str = "embedded:eagle3"
    inflate: tuple[int, int, int] = (768, 2304, 13)
    prompts: str = ""
    parts: tuple[Part, ...] = ("batches", "rates", "prefix", "first-token")
    rows: int = 8
    context: int = 32
    shortest: int = 16
    longest: int = 256
    draft: str = "chain:4"
    drafts: tuple[str, ...] = ("chain:2", "chain:4", "chain:6")
    requests: int = 64
    shares: tuple[float, ...] = (0.1, 0.3, 0.6, 0.9, 1.2)
    seconds: float = 40.0
    prefix: int = 1000
    sharing: int = 20
    repeats: int = 3
    steps: int = 8
    dtype: str = "float32"
    output: str = ""
    plot_rows: str = ""
    plot_rates: str = ""


class Request(NamedTuple):
    """A request: the token ids of the prompt, and the number of new tokens."""

    prompt: list[int]
    new_tokens: int


class Served(NamedTuple):
    """A served request: its ``tokens``, and times in seconds from the start of the run."""

    tokens: tuple[int, ...]
    submitted: float
    first_token: float
    finished: float


class Models(NamedTuple):
    """The target, the drafter, and prompts as token ids."""

    target: Target
    drafter: Drafter | None
    texts: list[np.ndarray]


def load(config: ArrivalsConfig) -> Models:
    """Load the inflated target, and the drafter of the small one."""
    dtype = jnp.dtype(config.dtype)
    directory = hub.locate(config.target, weights=False)
    small = Target.from_pretrained(config.target, dtype=dtype)
    drafter = (
        None
        if config.drafter == "none"
        else load_drafter(config.drafter, None, small.config, dtype)
    )
    target = small
    if any(config.inflate):
        hidden_size, intermediate_size, num_layers = config.inflate
        target = inflate(
            small,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=num_layers,
        )
        drafter = drafter and OnInflated.of(drafter, small)
    tokenizer = text.load_tokenizer(directory)
    texts = [
        np.asarray(text.encode(tokenizer, sample)) for sample in decode.read_texts(config.prompts)
    ]
    return Models(target, drafter, texts)


def requests_of(models: Models, config: ArrivalsConfig, count: int, seed: int) -> list[Request]:
    """Return requests with different prompts and lengths."""
    prompts = decode.prompts_of(models.texts, count, config.context)
    random = np.random.default_rng(seed)
    lengths = (
        np.exp(random.uniform(np.log(config.shortest), np.log(config.longest), count))
        .round()
        .astype(int)
    )
    return [
        Request(prompt.tolist(), int(most))
        for prompt, most in zip(random.permutation(prompts), lengths, strict=True)
    ]


def arrivals_of(rate: float, seconds: float, seed: int) -> np.ndarray:
    """Return arrival times within ``seconds``, of a Poisson process with ``rate`` per second.

    There is at least one arrival.
    """
    random = np.random.default_rng(seed)
    count = max(1, random.poisson(rate * seconds))
    return np.sort(random.uniform(0, seconds, count))


def engines_of(config: ArrivalsConfig, models: Models) -> dict[str, Engine]:
    """Return the engines that the parts need by name: without drafts, with drafts, and by load."""
    drafts: dict[str, tuple[str | None, ...]] = {"plain": (None,)}
    if models.drafter is not None and {"batches", "rates"} & set(config.parts):
        drafts |= {config.draft: (config.draft,)}
    if models.drafter is not None and "rates" in config.parts:
        drafts |= {BY_LOAD: (None, *config.drafts)}
    return {
        name: Engine(
            models.target,
            None if name == "plain" else models.drafter,
            rows=config.rows,
            drafts=shapes,
            steps=config.steps,
        )
        for name, shapes in drafts.items()
    }


def serve(
    engine: Engine, requests: Sequence[Request], arrivals: Sequence[float] | np.ndarray
) -> list[Served]:
    """Serve requests that are submitted at their times, in seconds from now."""
    began = time.perf_counter()
    handles = []
    for request, at in zip(requests, arrivals, strict=True):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        handles.append(
            engine.submit(request.prompt, max_new_tokens=request.new_tokens, eos_token_ids=())
        )
    served = []
    for handle in handles:
        tokens, times = handle.result().tokens, handle.times
        served.append(
            Served(
                tokens, times.submitted - began, times.first_token - began, times.finished - began
            )
        )
    return served


def serve_static(
    target: Target, drafter: Drafter | None, requests: Sequence[Request], rows: int
) -> tuple[list[Stay], list[tuple[int, ...]]]:
    """Serve requests in static batches in order of arrival.

    Each batch runs until its longest text ends. The end of a row's text is counted in steps of the
    batch.

    Returns:
        Who had which row when, and the tokens.
    """
    began, stays, texts = time.perf_counter(), [], []
    for first in range(0, len(requests), rows):
        batch = requests[first : first + rows]
        start = time.perf_counter() - began
        prompts = np.array([request.prompt for request in batch])
        most = [request.new_tokens for request in batch]
        result = specjax.generate(target, drafter, prompts, max_new_tokens=most, eos_token_ids=())
        seconds = time.perf_counter() - began - start
        shares = result.stats.steps / result.stats.steps.max()
        for row, share in enumerate(shares.tolist()):
            stays.append(Stay(first + row, row, start, start + seconds * share))
            texts.append(tuple(result.tokens[row, prompts.shape[1] : result.lengths[row]].tolist()))
    return stays, texts


def measure_batches(
    config: ArrivalsConfig, models: Models, engines: Mapping[str, Engine]
) -> list[dict[str, Any]]:
    """Compare static batches with the engine, plain and with the fixed draft shape.

    The results are requests per minute, and who had which row when.
    """
    requests = requests_of(models, config, config.requests, seed=0)
    results = []
    for name in [name for name in engines if name != BY_LOAD]:
        drafter = None if name == "plain" else replace(models.drafter, draft=as_shape(name))  # pyright: ignore
        serve_static(models.target, drafter, requests, config.rows)  # compiles
        seconds: dict[str, list[float]] = {"static": [], "continuous": []}
        for _ in range(config.repeats):
            stays, texts = serve_static(models.target, drafter, requests, config.rows)
            served = serve(engines[name], requests, np.zeros(len(requests)))
            seconds["static"].append(max(stay.end for stay in stays))
            seconds["continuous"].append(max(request.finished for request in served))
        last = stays_of([0.0] * len(served), [request.finished for request in served], config.rows)
        results.append(
            {
                "draft": name,
                "requests_per_minute": {
                    way: asdict(Spread.of([60 * len(requests) / total for total in all_]))
                    for way, all_ in seconds.items()
                },
                "gain": asdict(Spread.of([a / b for a, b in zip(*seconds.values(), strict=True)])),
                "ideal": ideal_gain([request.new_tokens for request in requests], config.rows),
                "same_tokens": mean(
                    text == request.tokens for text, request in zip(texts, served, strict=True)
                ),
                "stays": {
                    "static": [asdict(stay) for stay in stays],
                    "continuous": [asdict(stay) for stay in last],
                },
            }
        )
    return results


def ideal_gain(lengths: Sequence[int], rows: int) -> float:
    """Return the steps of static batches divided by those with all rows always in use.

    A step emits a token per row.
    """
    longest = [max(lengths[first : first + rows]) for first in range(0, len(lengths), rows)]
    return rows * sum(longest) / sum(lengths)


def measure_rates(
    config: ArrivalsConfig, models: Models, engines: Mapping[str, Engine]
) -> dict[str, Any]:
    """Measure every engine at every rate, with the same requests at the same times.

    The choice by load is compared with the better of the other engines. Below saturation every
    engine finishes all requests, and the time per request is compared. Above saturation that time
    grows as long as requests arrive, and requests per minute are compared.
    """
    most = saturated_rate(config, models, engines["plain"])
    rates = []
    for share in config.shares:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
        for repeat in range(config.repeats):
            arrivals = arrivals_of(share * most, config.seconds, seed=repeat)
            requests = requests_of(models, config, len(arrivals), seed=repeat)
            for name, engine in engines.items():
                runs[name].append(summary(serve(engine, requests, arrivals)))
        by_engine = {
            name: {figure: asdict(Spread.of([run[figure] for run in all_])) for figure in all_[0]}
            for name, all_ in runs.items()
        }
        row = {"share": share, "requests_per_minute": 60 * share * most, "engines": by_engine}
        if BY_LOAD in runs:
            row["compared_by"] = "requests_per_minute" if share >= 1 else "seconds_per_request"
            row["by_load_over_better"] = over_better(runs, row["compared_by"])
        rates.append(row)
    choices = engines[BY_LOAD].statistics.drafts if BY_LOAD in engines else []
    return {"plain_requests_per_minute": 60 * most, "rates": rates, "choice": choices}


def saturated_rate(config: ArrivalsConfig, models: Models, engine: Engine) -> float:
    """Return the requests per second that an engine finishes until the last one gets a row."""
    requests = requests_of(models, config, config.requests, seed=1)
    shortest, longest = config.shortest, config.longest
    # The expected number of tokens of a request.
    usual = (longest - shortest) / np.log(longest / shortest) if longest > shortest else shortest
    rates = []
    for _ in range(config.repeats):
        served = serve(engine, requests, np.zeros(len(requests)))
        stays = stays_of([0.0] * len(served), [request.finished for request in served], config.rows)
        until = max(stay.start for stay in stays) or max(stay.end for stay in stays)
        shares = [min(1.0, (until - stay.start) / stay.seconds) for stay in stays]
        tokens = sum(
            share * request.new_tokens for share, request in zip(shares, requests, strict=True)
        )
        rates.append(float(tokens / until / usual))
    return median(rates)


def summary(served: Sequence[Served]) -> dict[str, float]:
    """Return the figures of a run. Seconds per token are from arrival to end, as users see them."""
    first = [request.first_token - request.submitted for request in served]
    whole = [request.finished - request.submitted for request in served]
    per_token = [
        seconds / len(request.tokens) for seconds, request in zip(whole, served, strict=True)
    ]
    end = max(request.finished for request in served)
    return {
        "tokens_per_second": sum(len(request.tokens) for request in served) / end,
        "requests_per_minute": 60 * len(served) / end,
        "seconds_per_request": mean(whole),
        "first_token": mean(first),
        "first_token_p90": float(np.quantile(first, 0.9)),
        "seconds_per_token": mean(per_token),
        "seconds_per_token_p90": float(np.quantile(per_token, 0.9)),
    }


def over_better(runs: Mapping[str, Sequence[Mapping[str, float]]], figure: str) -> float:
    """Return the gain of the choice by load over the better other engine, a median; 1 is equal."""
    other_names = [name for name in runs if name != BY_LOAD]
    ratios = []
    for i, run in enumerate(runs[BY_LOAD]):
        values = [runs[name][i][figure] for name in other_names]
        ratios.append(
            run[figure] / max(values)
            if figure == "requests_per_minute"
            else min(values) / run[figure]
        )
    return median(ratios)


OWN, NEW = 8, 16
"""Tokens of a prompt of part prefix after those that all share, and new tokens."""


def measure_prefix(config: ArrivalsConfig, models: Models, engine: Engine) -> dict[str, Any]:
    """Compare requests with a common prefix with others: prefilled tokens, pages and time."""
    length, count = config.prefix + OWN, config.sharing
    if length + NEW > engine.capacity:
        raise InputError(
            f"prefix={config.prefix}: with {OWN + NEW} more, a text may have {engine.capacity}"
            " tokens"
        )
    pieces = decode.prompts_of(models.texts, config.repeats * (count + 1), length).reshape(
        config.repeats, count + 1, length
    )
    ends = np.random.default_rng(0).integers(0, models.target.config.vocab_size, (count, OWN))
    prompts = {
        "shared": [
            [[*common[: config.prefix].tolist(), *end.tolist()] for end in ends]
            for common in pieces[:, -1]
        ],
        "separate": pieces[:, :-1].tolist(),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in prompts}
    for repeat in range(config.repeats):
        for name, all_ in prompts.items():
            before = engine.statistics
            served = serve(
                engine, [Request(prompt, NEW) for prompt in all_[repeat]], np.zeros(count)
            )
            after = engine.statistics
            runs[name].append(
                {
                    "seconds": max(run.finished for run in served),
                    "prompt_tokens_read": after.prompt_tokens_read - before.prompt_tokens_read,
                    "prompt_tokens_shared": (
                        after.prompt_tokens_shared - before.prompt_tokens_shared
                    ),
                    "pages_held": pages_held(all_[repeat], page=engine.page, chunk=engine.chunk),
                }
            )
    sizes = {"page": engine.page, "chunk": engine.chunk}
    figures = ("seconds", "prompt_tokens_read", "prompt_tokens_shared", "pages_held")
    return sizes | {
        name: {figure: asdict(Spread.of([run[figure] for run in all_])) for figure in figures}
        for name, all_ in runs.items()
    }


def pages_held(prompts: Sequence[Sequence[int]], *, page: int, chunk: int) -> int:
    """Return the number of pages when all requests have rows and are prefilled.

    The scheduler alone determines this, so it is counted without a device.
    """
    capacity = max(map(len, prompts)) + NEW
    pages = len(prompts) * -(-capacity // page)
    scheduler = Scheduler(rows=len(prompts), pages=pages, page=page, chunk=chunk, capacity=capacity)
    for prompt in prompts:
        scheduler.submit(prompt, NEW)
    while reads := scheduler.next_reads(None):
        for read in reads:
            scheduler.was_read(read, None)
    return len(np.unique(scheduler.table[scheduler.table < pages]))


CHUNKS = (1, 2, 4)
"""The prompt lengths of part first-token in chunks, as far as they fit."""


def measure_first_token(
    config: ArrivalsConfig, models: Models, engine: Engine
) -> list[dict[str, Any]]:
    """Measure the time to the first token in the last free row, while all other rows are decoding.

    A chunk of the prompt is prefilled between two decode calls. So the request waits for about as
    many calls as it has chunks: the rest of the running call, one after each chunk but the last,
    and the call that emits the token.
    """
    random = np.random.default_rng(0)

    def submit(length: int, new_tokens: int) -> Any:
        prompt = random.integers(
            0, models.target.config.vocab_size, length
        ).tolist()  # shares nothing
        return engine.submit(prompt, max_new_tokens=new_tokens, eos_token_ids=())

    results = []
    for chunks in CHUNKS:
        length = chunks * engine.chunk + 1
        if length >= engine.capacity:
            break
        runs = []
        for _ in range(config.repeats):
            long_requests = [submit(2, engine.capacity - 2) for _ in range(config.rows - 1)]
            for long_request in long_requests:
                next(iter(long_request))  # it has begun
            before = engine.statistics.decode_calls
            handle = submit(length, 1)
            handle.result()
            runs.append(
                (
                    engine.statistics.decode_calls - before,
                    handle.times.first_token - handle.times.submitted,
                )
            )
            for long_request in long_requests:
                long_request.cancel()
        calls, seconds = zip(*runs, strict=True)
        row = {"prompt_tokens": length, "chunks": chunks}
        results.append(
            row | {"decode_calls": asdict(Spread.of(calls)), "seconds": asdict(Spread.of(seconds))}
        )
    return results


def run(config: ArrivalsConfig) -> dict[str, Any]:
    """Run all parts, and return the results as they are written to JSON."""
    check(config)
    models = load(config)
    results: dict[str, Any] = {
        "machine": decode.machine(),
        "settings": asdict(config),
        "parameters": {"target": params.count(models.target.params)},
    }

    def done(part: str, part_results: Any) -> None:
        results[part] = part_results
        if config.output:
            decode.write(results, Path(config.output))

    engines = engines_of(config, models)
    try:
        if "batches" in config.parts:
            done("batches", measure_batches(config, models, engines))
        if "rates" in config.parts:
            done("rates", measure_rates(config, models, engines))
        if "prefix" in config.parts:
            done("prefix", measure_prefix(config, models, engines["plain"]))
        if "first-token" in config.parts:
            done("first_token", measure_first_token(config, models, engines["plain"]))
    finally:
        for engine in engines.values():
            engine.close()
    return results


def check(config: ArrivalsConfig) -> None:
    """Refuse invalid options."""
    for name in ("rows", "context", "shortest", "requests", "sharing", "repeats"):
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)}: must be at least 1")
    if config.longest < config.shortest:
        raise InputError(f"longest={config.longest}: must be at least shortest={config.shortest}")
    if min(config.shares, default=0) <= 0 or config.seconds <= 0:
        raise InputError(f"shares={config.shares}, seconds={config.seconds:g}: must be above 0")
    if config.dtype not in ("float32", "bfloat16"):
        raise InputError(f"dtype={config.dtype!r}: must be float32 or bfloat16")
    for argument, part in (("plot_rows", "batches"), ("plot_rates", "rates")):
        if name := getattr(config, argument):
            pictures.check_path(argument, name)
            if part not in config.parts:
                raise InputError(
                    f"{argument}={name!r}: is a picture of part {part}, which is not in"
                    f" parts={config.parts}"
                )


def main(config: ArrivalsConfig) -> None:
    """Measure, print the tables and draw the pictures."""
    results = run(config)
    arrivals_tables.show(results, Console(width=150))
    if config.plot_rows:
        pictures.save(arrivals_tables.rows_picture(results), "plot_rows", Path(config.plot_rows))
    if config.plot_rates:
        pictures.save(arrivals_tables.rates_picture(results), "plot_rates", Path(config.plot_rates))


if __name__ == "__main__":
    try:
        main(tyro.cli(ArrivalsConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
