"""Speed of constrained texts in the engine: with and without a grammar, with and without drafts.

    python -m benchmarks.grammars --output grammars.json
    python -m benchmarks.grammars --parts masks --tokenizer DIR --vocabulary 150000

There are six parts. *legal*: a grammar that the free text satisfies; the free calls and the masked
steps of the engine are also measured by themselves. *taught*: the same with a schema, on a target
that `benchmarks.teach` has taught to write such JSON. *leaving*: a grammar that forbids about a
third of the tokens that the model would write, with drafts and without. *keys*: a JSON object with
20 fixed keys. *beside*: a free row beside seven others. *masks*: the host's time for the masks of 8
rows of 8 nodes, without a model. All runs of a part are interleaved.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import specjax
from benchmarks import arrivals, decode, teach
from specjax import text
from specjax.decoding.constrained import legal_tokens
from specjax.drafts import tree
from specjax.drafts.draft import Draft
from specjax.errors import InputError
from specjax.grammars import GrammarCompiler
from specjax.models import hub
from specjax.serving import Engine, Handle

Part = Literal["legal", "taught", "leaving", "keys", "beside", "masks"]
ANYTHING = specjax.Regex(r"(.|\n)*")
KEYS = specjax.JsonSchema(
    {
        "type": "object",
        "properties": {
            f"{first} {second}": {"type": "integer", "minimum": 0, "maximum": 9}
            for first in ("maximum", "minimum", "average", "previous", "remaining")
            for second in ("temperature", "distance", "number of items", "seconds")
        },
        "required": [
            f"{first} {second}"
            for first in ("maximum", "minimum", "average", "previous", "remaining")
            for second in ("temperature", "distance", "number of items", "seconds")
        ],
        "additionalProperties": False,
    },
    whitespace=False,
)


@dataclass(frozen=True)
class SpeedConfig:
    """The models and texts of which the speed is measured.

    Attributes:
        target: directory or hub id of the target.
        drafter: as for `specjax generate`.
        inflate: hidden size, MLP size and layers to which the target is padded, with the same
            outputs; 0 0 0 does not pad it.
        rows: numbers of rows in use.
        draft: the draft shape, besides plain decoding.
        context: tokens of a prompt.
        new_tokens: new tokens of a text.
        temperature: the temperature.
        repeats: repeats of every measurement.
        output: JSON file for the results.
    """

    target: str = "embedded"
    drafter: str = "embedded:eagle3"
    inflate: tuple[int, int, int] = (640, 1856, 12)
    rows: tuple[int, ...] = (1, 8)
    draft: str = "chain:3"
    context: int = 32
    new_tokens: int = 96
    temperature: float = 0.7
    repeats: int = 5
    output: str = ""

    def __post_init__(self) -> None:
        """Refuse numbers that measure nothing."""
        if self.repeats < 1 or min(self.rows, default=0) < 1:
            raise InputError(f"repeats={self.repeats}, rows={self.rows}: at least 1")


@dataclass(frozen=True)
class GrammarsConfig(SpeedConfig):
    """Measure constrained texts.

    Attributes:
        parts: parts to measure.
        excluded: characters that no text of part leaving may have.
        tokenizer: directory with the tokenizer of part masks; empty: that of the target.
        vocabulary: number of tokens of part masks; 0: that of the tokenizer.
    """

    parts: tuple[Part, ...] = ("legal", "leaving", "keys", "beside", "masks")
    excluded: str = "eE"
    tokenizer: str = ""
    vocabulary: int = 0


class Bench(NamedTuple):
    """The engines by name, and the prompts as token ids.

    The engine "plain" has no drafter. All others choose between plain decoding and the draft.
    """

    engines: Mapping[str, Engine]
    prompts: list[list[int]]


class Run(NamedTuple):
    """One way to serve some rows.

    Attributes:
        engine: the engine's name.
        requests: what each row's request states, such as its grammar.
        calls: how the engine decodes constrained rows, see `ConstrainedCalls.kinds`.
        row: the row whose speed is measured; None: all rows together.
    """

    engine: str
    requests: Sequence[Mapping[str, Any]]
    calls: Literal["chosen", "masked", "free"] = "chosen"
    row: int | None = None


def start(config: SpeedConfig, engines: Mapping[str, Mapping[str, Any]]) -> Bench:
    """Load the inflated target and the drafter, and make the engines.

    Args:
        config: the models, and the sizes of engines and prompts.
        engines: options of each engine by its name. The engine "plain" has no drafter.
    """
    models = arrivals.load(
        arrivals.ArrivalsConfig(
            target=config.target, drafter=config.drafter, inflate=config.inflate
        )
    )
    tokenizer = text.load_tokenizer(hub.locate(config.target, weights=False))
    most = max(config.rows)
    options: dict[str, Any] = {
        "rows": most,
        "widths": tuple(sorted({1, most})),
        "capacity": 512,
        "tokenizer": tokenizer,
    }
    drafting = {"drafter": models.drafter, "drafts": (None, config.draft)}
    prompts = decode.prompts_of(models.texts, most * config.repeats, config.context)
    return Bench(
        {
            name: Engine(
                models.target,
                **options,
                **({"drafter": None} if name == "plain" else drafting),
                **options_of_engine,
            )
            for name, options_of_engine in engines.items()
        },
        prompts.tolist(),
    )


def rates(bench: Bench, run: Run, repeat: int, config: SpeedConfig) -> tuple[float, float]:
    """Serve the rows of a run, and return tokens per second and per second of CPU time.

    The time of the prefill is included. CPU time is that of all threads of the process. On one core
    it is hardly disturbed by other processes.
    """
    engine, count = bench.engines[run.engine], len(run.requests)
    if engine.has_grammars:
        engine._loop._constrained.kinds = run.calls
    prompts = [bench.prompts[(repeat * count + row) % len(bench.prompts)] for row in range(count)]
    began = time.process_time()
    handles: list[Handle] = [
        engine.submit(
            **{
                "prompt": prompt,
                "max_new_tokens": config.new_tokens,
                "temperature": config.temperature,
            }
            | {"seed": repeat, "eos_token_ids": ()}
            | request,
        )
        for prompt, request in zip(prompts, run.requests, strict=True)
    ]
    if run.row is not None:
        measured = [handles[run.row]]
        measured[0].result()
        cpu = time.process_time() - began
        for handle in handles:
            handle.cancel()
    else:
        measured = handles
        for handle in handles:
            handle.result()
        cpu = time.process_time() - began
    tokens = sum(len(handle.tokens) for handle in measured)
    first = min(handle.times.submitted for handle in handles)
    last = max(handle.times.finished or 0.0 for handle in measured)
    return tokens / (last - first), tokens / cpu


def compare(bench: Bench, runs: Mapping[str, Run], config: SpeedConfig) -> dict[str, Any]:
    """Return the rates of all runs, interleaved, and each one's ratio to the first."""
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(-1, config.repeats):  # the first run warms up
        for name, run in runs.items():
            values = rates(bench, run, max(repeat, 0), config)
            if repeat >= 0:
                measured[name].append(values)
    first = np.array(next(iter(measured.values())))
    results = {}
    for name, values in measured.items():
        per_second, per_cpu_second = np.median(values, axis=0).tolist()
        over, over_cpu = np.median(np.array(values) / first, axis=0).tolist()
        results[name] = {
            "tokens_per_second": per_second,
            "spread": [min(it[0] for it in values), max(it[0] for it in values)],
            "over_first": over,
            "tokens_per_cpu_second": per_cpu_second,
            "spread_cpu": [min(it[1] for it in values), max(it[1] for it in values)],
            "over_first_cpu": over_cpu,
        }
    return results


def runs_of(part: Part, rows: int, bench: Bench, config: GrammarsConfig) -> dict[str, Run]:
    """Return the runs of a part that are compared, the reference first."""
    leaving = specjax.Regex(rf"[^{config.excluded}]*")
    free, legal, remaining = ([{"grammar": it}] * rows for it in (None, ANYTHING, leaving))
    if part == "legal":
        return {
            "free": Run("drafts", free),
            "constrained": Run("drafts", legal),
            "free calls": Run("drafts", legal, "free"),
            "masked steps": Run("drafts", legal, "masked"),
        }
    if part == "taught":
        prompt = text.encode(bench.engines["drafts"].tokenizer, teach.PROMPT)
        schema = specjax.JsonSchema(teach.SCHEMA, whitespace=False)
        requests = [{"prompt": prompt, "choice": row} for row in range(rows)]
        records = [{**request, "grammar": schema} for request in requests]
        return {
            "free": Run("drafts", requests),
            "constrained": Run("drafts", records),
            "free calls": Run("drafts", records, "free"),
            "masked steps": Run("drafts", records, "masked"),
        }
    if part == "leaving":
        return {
            "no drafter": Run("plain", remaining, "masked"),
            "with drafts": Run("drafts", remaining),
            "masked steps": Run("drafts", remaining, "masked"),
            "free calls": Run("drafts", remaining, "free"),
        }
    if part == "keys":
        return {
            "free": Run("drafts", free),
            "20 keys": Run("drafts", [{"grammar": KEYS, "max_new_tokens": 400}] * rows),
        }
    return {
        "free": Run("drafts", free, row=0),
        "legal": Run("drafts", [*free[:1], *legal[1:]], row=0),
        "leaving": Run("drafts", [*free[:1], *remaining[1:]], row=0),
    }


def masks(config: GrammarsConfig) -> dict[str, Any]:
    """Return the milliseconds of the host for the masks of 8 rows of 8 nodes."""
    directory = Path(config.tokenizer or hub.locate(config.target, weights=False))
    tokenizer = text.load_tokenizer(directory)
    size = config.vocabulary or len(tokenizer)
    compiler = GrammarCompiler(tokenizer, size)
    rows, nodes = 8, 8
    ids = text.encode(tokenizer, json.dumps({"ab": ["x y", 12, {"some text": None}] * 40}))
    measured = {}
    for name, grammar in {"JSON": specjax.JsonObject(), "regex": ANYTHING}.items():
        matchers = [compiler.compile(grammar).matcher((0,)) for _ in range(rows)]
        times, cpu_times = [], []
        for position in range(0, len(ids) - nodes, nodes):
            drafted = np.tile(np.asarray(ids[position - 1 : position + nodes - 1]), (rows, 1))
            if position == 0:
                drafted = np.tile(np.asarray([0, *ids[: nodes - 1]]), (rows, 1))
            draft = jax.device_get(Draft.of_tree(jnp.asarray(drafted), tree.chain_parents(nodes)))
            started, cpu_started = time.perf_counter(), time.process_time()
            legal_tokens(matchers, draft, size)
            times.append(1e3 * (time.perf_counter() - started))
            cpu_times.append(1e3 * (time.process_time() - cpu_started))
            for matcher in matchers:
                matcher.append(ids[position : position + nodes])
        measured[name] = {
            "milliseconds": median(times),
            "spread": [min(times), max(times)],
            "ninetieth": float(np.quantile(times, 0.9)),
            "milliseconds_of_cpu": median(cpu_times),
        }
    return {"tokens": size, "rows": rows, "nodes": nodes} | measured


def illegal_share(bench: Bench, config: GrammarsConfig) -> float:
    """Return the share of positions of leaving texts whose likeliest token is not legal."""
    engine = bench.engines["drafts"]
    grammar = specjax.Regex(rf"[^{config.excluded}]*")
    compiled = GrammarCompiler(engine.tokenizer, engine.target.config.vocab_size).compile(grammar)
    illegal = total = 0
    for prompt in bench.prompts[:8]:
        output = engine.submit(
            prompt, max_new_tokens=config.new_tokens, eos_token_ids=(), grammar=grammar
        ).result()
        whole = jnp.asarray([[*prompt, *output.tokens]])
        best = np.asarray(engine.target.forward(whole)[0].logits[0].argmax(-1))
        matcher = compiled.matcher(())
        for index, token in enumerate(output.tokens):
            likeliest = int(best[len(prompt) - 1 + index])
            illegal += not matcher.mask()[likeliest >> 5] >> np.uint32(likeliest & 31) & 1
            matcher.append([token])
        total += len(output.tokens)
    return illegal / total


def run(config: GrammarsConfig, show: Callable[[str, int, dict[str, Any]], None]) -> dict[str, Any]:
    """Measure all parts, and ``show`` each table when it is there."""
    results: dict[str, Any] = {"config": asdict(config), "machine": decode.machine()}
    if "masks" in config.parts:
        results["masks"] = masks(config)
        print(json.dumps(results["masks"]), flush=True)
    parts: list[Part] = [part for part in config.parts if part != "masks"]
    if not parts:
        return results
    bench = start(config, {name: {"grammars": True} for name in ("drafts", "plain")})
    try:
        if "leaving" in parts:
            results["illegal_share"] = illegal_share(bench, config)
            print(f"illegal share: {results['illegal_share']:.3f}", flush=True)
        for part in parts:
            for rows in config.rows if part != "beside" else (max(config.rows),):
                measured = compare(bench, runs_of(part, rows, bench, config), config)
                results.setdefault(part, {})[rows] = measured
                show(part, rows, measured)
    finally:
        for engine in bench.engines.values():
            engine.close()
    return results


def show(part: str, rows: int, measured: dict[str, Any]) -> None:
    """Print the table of a part."""
    columns = part, "tokens/s", "over the first", "tokens/s of CPU time", "over the first"
    table = Table(*columns, title=f"{part}, {rows} rows")
    for name, row in measured.items():
        cells = [name]
        for rate, spread, over in (
            ("tokens_per_second", "spread", "over_first"),
            ("tokens_per_cpu_second", "spread_cpu", "over_first_cpu"),
        ):
            low, high = row[spread]
            cells += [f"{row[rate]:.1f} ({low:.1f} to {high:.1f})", f"{row[over]:.2f}"]
        table.add_row(*cells)
    Console(width=120).print(table)


def main(config: GrammarsConfig) -> None:
    """Measure, print the tables, and write the results."""
    results = run(config, show)
    if config.output:
        decode.write(results, Path(config.output))


if __name__ == "__main__":
    try:
        main(tyro.cli(GrammarsConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
