"""Decoding speed: plain, with each drafter, and `transformers` on the same weights and prompts.

    python -m benchmarks.decode                                      # the embedded pair, its target
    inflated to about 90M
    python -m benchmarks.decode --target DIR --draft DIR --prompts FILE.jsonl --batch 1 8
    python -m benchmarks.decode --dtype bfloat16 --inflate 4096 14336 12                # on a GPU
    python -m benchmarks.decode --synthetic-acceptance 0.8 --shape llama-3.2-1b   # random weights:
    costs of steps only

All runs of a case are interleaved, and every figure is a median with its spread.
"""

import importlib
import inspect
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import specjax
from benchmarks import peers, synthetic
from specjax import decoding, text
from specjax.decoding.options import GenerationOptions
from specjax.demo import OnInflated, inflate
from specjax.drafters import Drafter, DraftModel, check_vocabulary
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError
from specjax.evaluation import metrics
from specjax.models import config_json, hub, params
from specjax.models.transformer import Target
from specjax.planning.costs import measure_costs, predicted_speedup
from specjax.sampling import Rule, Sampling


@dataclass(frozen=True)
class BenchmarkConfig:
    """Measure decoding.

    Attributes:
        target: directory or hub id of the target; "embedded" is the small model that comes with
            specjax.
        draft: directory or hub id of the draft model.
        eagle3: directory or hub id of an EAGLE-3 drafter of the target, or "embedded:eagle3";
            empty: none.
        inflate: hidden size, MLP size and layers to which the target is padded, with the same
            outputs; 0 0 0 does not pad it.
        prompts: JSON lines with a "text" each; by default modules of the standard library, on which
            the embedded pair is trained.
        batch: numbers of rows, one case each.
        context: prompt tokens, one case each.
        prompts_per_case: minimum number of different prompts, in batches one after another.
        new_tokens: tokens to generate in every row.
        temperature: sampling temperature; 0 is greedy. Above 0 the peers are left out.
        rules: rules for every method, see `specjax.sampling.Rule`; by default the best rule of its
            draft shape.
        repeats: repeats of every method.
        exit_layers: layers that draft in early exit.
        methods: methods to run, by the beginnings of their names; by default all. Plain decoding
            always runs.
        compare: run `transformers` too.
        synthetic_acceptance: use random weights of `shape` that accept a drafted token with this
            probability, instead of real models.
        shape: published shape of a synthetic target.
        draft_shape: published shape of its draft model.
        dtype: data type of all weights, here and in `transformers`, float32 or bfloat16.
        output: JSON file for the results.
    """

    target: str = "embedded"
    draft: str = "embedded:draft"
    eagle3: str = ""
    inflate: tuple[int, int, int] = (768, 2304, 13)
    prompts: str = ""
    batch: tuple[int, ...] = (1, 4, 16)
    context: tuple[int, ...] = (64, 512)
    prompts_per_case: int = 2
    new_tokens: int = 128
    temperature: float = 0.0
    rules: tuple[Rule, ...] = ()
    repeats: int = 5
    exit_layers: int = 2
    methods: tuple[str, ...] = ()
    compare: bool = True
    synthetic_acceptance: float | None = None
    shape: str = "llama-3.2-1b"
    draft_shape: str = ""
    dtype: str = "float32"
    output: str = ""


Runner = Callable[[np.ndarray], dict[str, Any]]
"""A function that generates from prompts ``[B, P]``.

It returns the ``seconds`` of the call, ``tokens [B, P + new]``, and further figures.
"""


def run(config: BenchmarkConfig) -> dict[str, Any]:
    """Run every case, and return the results as they are written to JSON."""
    for name in ("repeats", "prompts_per_case", "new_tokens"):
        if getattr(config, name) < 1:
            raise InputError(f"{name}={getattr(config, name)}: must be at least 1")
    for name in ("batch", "context"):
        if min(getattr(config, name), default=0) < 1:
            raise InputError(f"{name}={getattr(config, name)}: each must be at least 1")
    if config.dtype not in ("float32", "bfloat16"):
        raise InputError(f"dtype={config.dtype!r}: must be float32 or bfloat16")
    if config.synthetic_acceptance is not None:
        target, drafters = synthetic.models(
            config.shape, config.draft_shape, config.synthetic_acceptance, config.dtype
        )
        texts = [np.random.default_rng(0).integers(0, target.config.vocab_size, 100_000)]
        peer_methods: dict[str, Runner] = {}
    else:
        target, drafters, texts, peer_methods = load(config)
    drafters = chosen(drafters, config.methods)
    results = {
        "machine": machine(),
        "settings": asdict(config),
        "note": "synthetic: random weights, acceptance is forced"
        if config.synthetic_acceptance is not None
        else "real models",
        "parameters": {"target": params.count(target.params)},
        "cases": [],
    }
    for context in config.context:
        for batch in config.batch:
            groups = -(-config.prompts_per_case // batch)
            prompts = np.split(prompts_of(texts, batch * groups, context), groups)
            case = measure_case(config, target, drafters, peer_methods, prompts, results["note"])
            results["cases"].append(case)
            if config.output:
                write(results, Path(config.output))
    return results


def chosen(
    drafters: dict[str, Drafter | None], methods: Sequence[str]
) -> dict[str, Drafter | None]:
    """Return the drafters selected by the beginnings of their names, and plain decoding."""
    for name in methods:
        if not any(method.startswith(name) for method in drafters):
            raise InputError(
                f"methods={name!r}: no name begins so; there are {', '.join(drafters)}"
            )
    return {
        method: drafter
        for method, drafter in drafters.items()
        if method.startswith(("plain", *(methods or ("",))))
    }


def load(
    config: BenchmarkConfig,
) -> tuple[Target, dict[str, Drafter | None], list[np.ndarray], dict[str, Runner]]:
    """Load the inflated target, our methods, the texts as token ids, and the peers' methods."""
    files, draft_files = (
        hub.open_checkpoint(name, weights=False) for name in (config.target, config.draft)
    )
    check_vocabulary(config_json.read_config(draft_files), config_json.read_config(files))
    dtype = jnp.dtype(config.dtype)
    target = Target.from_pretrained(files, dtype=dtype)
    small, draft = target, Target.from_pretrained(draft_files, dtype=dtype)
    if any(config.inflate):
        hidden_size, intermediate_size, num_layers = config.inflate
        target = inflate(
            target,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_layers=num_layers,
        )
    peer_methods: dict[str, Runner] = {}
    if config.compare and not config.temperature:
        with tempfile.TemporaryDirectory() as scratch:
            target.save_pretrained(Path(scratch) / "target")
            draft.save_pretrained(Path(scratch) / "draft")
            peer_methods = peers.methods(
                Path(scratch) / "target", Path(scratch) / "draft", config.new_tokens, config.dtype
            )
    tokenizer = text.load_tokenizer(files.directory)
    texts = [np.asarray(text.encode(tokenizer, sample)) for sample in read_texts(config.prompts)]
    methods = drafters_of(draft, config.exit_layers)
    if config.eagle3:
        eagle3 = specjax.Eagle3.from_pretrained(hub.locate(config.eagle3), dtype=dtype)
        for name, shape in EAGLE_SHAPES.items():
            methods[f"EAGLE-3, {name}"] = OnInflated.of(replace(eagle3, draft=shape), small)
    return target, methods, texts, peer_methods


EAGLE_SHAPES: dict[str, DraftShape] = {
    "chain 5": specjax.Chain(5),
    "dynamic 16": specjax.DynamicTree(top_k=4, depth=5, nodes=16),
}

SMALL_TREE = (
    (0,),
    (1,),
    (0, 0),
    (0, 1),
    (0, 0, 0),
    (0, 0, 0, 0),
    (0, 0, 0, 0, 0),
    (0, 0, 0, 0, 0, 0),
)
"""A typical result of `specjax plan measure`: a chain with a second child where it helps most."""


def drafters_of(draft: Target, exit_layers: int) -> dict[str, Drafter | None]:
    """Return our methods by name."""
    return {
        "plain": None,
        "draft model, chain 4": DraftModel(draft, draft=specjax.Chain(4)),
        "draft model, chain 8": DraftModel(draft, draft=specjax.Chain(8)),
        "draft model, static 9": DraftModel(draft, draft=specjax.StaticTree(SMALL_TREE)),
        "draft model, dynamic 16": DraftModel(
            draft, draft=specjax.DynamicTree(top_k=4, depth=5, nodes=16)
        ),
        "draft model, adaptive 16": DraftModel(draft, draft=specjax.Chain(16, stop_below=0.4)),
        "prompt lookup, 8": specjax.PromptLookup(draft=specjax.Chain(8)),
        "token recycling, dynamic 16": specjax.TokenRecycling(
            draft=specjax.DynamicTree(top_k=4, depth=5, nodes=16)
        ),
        f"early exit after {exit_layers}, chain 2": specjax.EarlyExit(
            exit_layers, draft=specjax.Chain(2)
        ),
    }


def read_texts(path: str) -> list[str]:
    """Return the texts of a JSON-lines file, or the source of standard modules."""
    if not path:
        names = (
            "argparse",
            "heapq",
            "textwrap",
            "queue",
            "csv",
            "fractions",
            "configparser",
            "shlex",
        )
        return [inspect.getsource(importlib.import_module(name)) for name in names]
    try:
        return [
            json.loads(line)["text"] for line in Path(path).read_text().splitlines() if line.strip()
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f'prompts={path!r}: not a readable file of JSON lines with "text" ({error})'
        ) from None


def prompts_of(texts: list[np.ndarray], count: int, context: int) -> np.ndarray:
    """Return ``[count, context]`` pieces, evenly spread over all texts joined.

    A piece may reach into the next text.
    """
    joined = np.concatenate(texts)
    if len(joined) < 2 * context:
        raise InputError(
            f"context={context}: the prompts hold {len(joined)} tokens in all; give longer ones"
        )
    starts = np.linspace(0, len(joined) - context, count + 2)[1:-1].astype(int)
    return np.stack([joined[start : start + context] for start in starts])


def measure_case(
    config: BenchmarkConfig,
    target: Target,
    drafters: dict[str, Drafter | None],
    peer_methods: dict[str, Runner],
    prompts: list[np.ndarray],
    note: str,
) -> dict[str, Any]:
    """Measure a batch size and context: all methods interleaved, then the costs of their parts."""
    batch, context = prompts[0].shape
    sampling = Sampling(temperature=config.temperature)
    if config.rules:
        methods = {
            f"{name}, {rule}": (drafter, rule)
            for name, drafter in drafters.items()
            for rule in config.rules
        }
    else:
        methods = {name: (drafter, None) for name, drafter in drafters.items()}
    plain, *_ = methods
    runners = {
        name: ours(target, drafter, sampling, config.new_tokens, rule)
        for name, (drafter, rule) in methods.items()
    }
    runners |= {
        name: runner
        for name, runner in peer_methods.items()
        if batch == 1 or name not in peers.ONE_ROW
    }
    for runner in runners.values():
        runner(prompts[0])  # compiles
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in runners}
    order = list(runners.items())
    for repeat in range(config.repeats):
        random.Random(repeat).shuffle(order)  # nobody always runs after the same neighbour
        for name, runner in order:
            runs[name].append(_joined([runner(group) for group in prompts]))
    emitted = len(prompts) * batch * config.new_tokens
    reference = runs[plain][0]["tokens"]
    case: dict[str, Any] = {
        "batch": batch,
        "context": context,
        "prompts": len(prompts) * batch,
        "methods": {},
    }
    for name, results in runs.items():
        rates = [emitted / result["seconds"] for result in results]
        row = {"tokens_per_second": median(rates), "spread": [min(rates), max(rates)]}
        row["same_tokens"] = float(np.mean(np.all(results[0]["tokens"] == reference, axis=1)))
        if name in methods:
            row |= _realised(config, target, *methods[name], (batch, context), results, runs[plain])
        case["methods"][name] = row
    Console(width=140).print(table(case, config, note))
    return case


def _joined(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the runs of a method over the batches of a case: seconds are added up."""
    seconds = {
        name: sum(group[name] for group in groups) for name in groups[0] if name.endswith("seconds")
    }
    tokens = np.concatenate([group["tokens"][:, : group["width"]] for group in groups])
    return seconds | {"tokens": tokens, "stats": [group.get("stats") for group in groups]}


def ours(
    target: Target,
    drafter: Drafter | None,
    sampling: Sampling,
    new_tokens: int,
    rule: Rule | None = None,
) -> Runner:
    """Return the runner of a method of this library."""

    options = GenerationOptions(
        max_new_tokens=new_tokens, sampling=sampling, eos_token_ids=(), rule=rule
    )

    def generate(prompts: np.ndarray) -> dict[str, Any]:
        started = time.perf_counter()
        used, state = decoding.start(target, drafter, prompts, options=options)
        jax.block_until_ready(state)
        read = time.perf_counter()
        state = jax.block_until_ready(decoding.decode(target, used, state, 2**31 - 1))
        ended = time.perf_counter()
        return {
            "seconds": ended - started,
            "decode_seconds": ended - read,
            "tokens": np.asarray(state.tokens),
            "width": prompts.shape[1] + new_tokens,
            "stats": jax.device_get(state.stats),
        }

    return generate


def _realised(
    config: BenchmarkConfig,
    target: Target,
    drafter: Drafter | None,
    rule: Rule | None,
    shape: tuple[int, int],
    results: list[dict[str, Any]],
    plain: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the speed-up of decoding without the prompt, measured and predicted from the costs."""
    batch, context = shape
    stats = results[0]["stats"]
    total = metrics.summarise(jax.tree.map(lambda *groups: np.concatenate(groups), *stats))
    speedups = [
        b["decode_seconds"] / a["decode_seconds"] for a, b in zip(results, plain, strict=True)
    ]
    costs = measure_costs(
        target,
        drafter,
        batch=batch,
        context=context + config.new_tokens // 2,
        new_tokens=config.new_tokens // 2,
        sampling=Sampling(temperature=config.temperature),
        rule=rule,
        repeats=config.repeats,
    )
    predicted = predicted_speedup(costs, *stats)
    return {
        "acceptance_length": total.acceptance_length,
        "acceptance_rate": total.acceptance_rate,
        "speedup": median(speedups),
        "speedup_spread": [min(speedups), max(speedups)],
        "predicted": predicted,
        "realised_share": median(speedups) / predicted,
        "verify_ms": {nodes: seconds * 1e3 for nodes, seconds in costs.verify.items()},
        "draft_ms": costs.draft_time * 1e3,
    }


def table(case: dict[str, Any], config: BenchmarkConfig, note: str) -> Table:
    """Return the table of a case."""
    title = (
        f"batch {case['batch']}, context {case['context']}, {config.new_tokens} new tokens, "
        f"temperature {config.temperature:g}; {note}"
    )
    result = Table(title=title)
    columns = (
        "method",
        "tokens/s",
        "spread",
        "speed-up",
        "predicted",
        "realised",
        "length",
        "rate",
        "T_D ms",
        "T_V(n) ms",
    )
    for index, column in enumerate(columns):
        result.add_column(column, justify="right" if index else "left")

    def show(row: dict[str, Any], name: str, form: str) -> str:
        return format(row[name], form) if row.get(name) is not None else "-"

    for name, row in case["methods"].items():
        verify = " ".join(f"{nodes}:{ms:.1f}" for nodes, ms in row.get("verify_ms", {}).items())
        low, high = row["spread"]
        result.add_row(
            name,
            f"{row['tokens_per_second']:.1f}",
            f"{low:.0f}-{high:.0f}",
            show(row, "speedup", ".2f"),
            show(row, "predicted", ".2f"),
            show(row, "realised_share", ".2f"),
            show(row, "acceptance_length", ".2f"),
            show(row, "acceptance_rate", ".2f"),
            show(row, "draft_ms", ".2f"),
            verify or "-",
        )
    return result


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": {name: _version(name) for name in ("jax", "torch", "transformers")},
    }


def _commit() -> str | None:
    """Return the commit of this code, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except ImportError:
        return None


def write(results: dict[str, Any], path: Path) -> None:
    """Write a JSON file, completely or not at all."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(json.dumps(results, indent=1) + "\n")
    scratch.replace(path)


if __name__ == "__main__":
    try:
        run(tyro.cli(BenchmarkConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
