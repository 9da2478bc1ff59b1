"""Speculation with a compressed cache by context and batch, predicted and measured.

python -m benchmarks.long_context --target runs/long_context/best --output long_context.json --plot
long_context.png

This is the figure of MagicDec. For every context and number of rows the parts are measured: a step
of plain decoding, verifications, drafted tokens with several cache budgets, and how far chains are
accepted after real texts of that length. From these the best budget and chain are chosen. Then
plain decoding and that choice decode the same prompts in turn, and the times are compared.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import specjax
from specjax import decoding, text
from specjax.cli.plan.contexts import contexts_table
from specjax.decoding.options import GenerationOptions
from specjax.demo import inflate
from specjax.drafters import CompressedCache, Drafter, SnapKV, Streaming
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.models import hub
from specjax.planning.contexts import (
    TRIAL_TOKENS,
    Gain,
    MeasuredContexts,
    forget_programs,
    measure_contexts,
)
from specjax.reports import pictures
from specjax.reports.speedups import draw_by_batch
from specjax.sampling import Sampling
from specjax.training.documents import find_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LongContextConfig:
    """Measure speed-up over rows for several contexts.

    Attributes:
        target: directory or hub id of a target that supports the longest context and the new
            tokens.
        source: files of long texts: a directory or a glob; by default numpy's own source.
        mlp: pad the target's MLP with zeros to this many units before measuring, which makes the
            weights heavier and keeps the outputs up to rounding; 0 does not pad it.
        scheme: the compressed cache: streaming or snapkv.
        contexts: tokens of a prompt.
        batches: numbers of rows.
        budgets: slots of a row in the drafter's cache.
        longest: longest chain.
        new_tokens: tokens to generate in each timed run.
        temperature: sampling temperature; 0 is greedy.
        repeats: timed runs of each; the median counts.
        realise: False measures only the parts.
        output: .json file for the results; if empty, they are only printed.
        plot: picture to write.
    """

    target: str
    source: str = str(Path(np.__file__).parent / "**/*.py")
    mlp: int = 0
    scheme: str = "streaming"
    contexts: tuple[int, ...] = (512, 2048, 8192)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    budgets: tuple[int, ...] = (128, 256, 512)
    longest: int = 6
    new_tokens: int = 64
    temperature: float = 0.0
    repeats: int = 3
    realise: bool = True
    output: str = ""
    plot: str = ""


_SCHEMES = {"streaming": Streaming(), "snapkv": SnapKV()}


def long_texts(source: str, target: str, tokens: int, count: int) -> np.ndarray:
    """Return ``[count, tokens]`` the beginnings of the longest files.

    They are repeated if there are too few.
    """
    tokenizer = text.load_tokenizer(hub.locate(target))
    files = sorted(find_files(source), key=lambda file: -file.stat().st_size)
    texts = []
    for file in files:
        ids = text.encode(tokenizer, file.read_text(encoding="utf-8", errors="replace"))
        if len(ids) >= tokens:
            texts.append(ids[:tokens])
        if len(texts) == count:
            break
    if not texts:
        raise InputError(f"source={source!r}: no file there has {tokens} tokens")
    return np.resize(np.array(texts, np.int32), (count, tokens))


def decode_seconds(
    target: Any, drafters: list[Drafter | None], prompts: np.ndarray, options: Any, repeats: int
) -> list[float]:
    """Return the median decoding time after ``prompts`` for each drafter, without the prefill."""
    started = [decoding.start(target, drafter, prompts, options=options) for drafter in drafters]
    seconds: list[list[float]] = [[] for _ in drafters]
    for repeat in range(-1, repeats):  # the first one compiles
        for i, (drafter, state) in enumerate(started):
            fresh = jax.block_until_ready(jax.tree.map(jnp.copy, state))  # which decoding takes
            began = time.perf_counter()
            jax.block_until_ready(decoding.decode(target, drafter, fresh, jnp.iinfo(jnp.int32).max))
            if repeat >= 0:
                seconds[i].append(time.perf_counter() - began)
    return [median(times) for times in seconds]


def load_target(config: LongContextConfig) -> specjax.Target:
    """Load the target with padded MLP units."""
    target = specjax.Target.from_pretrained(config.target, dtype=np.float32)
    shape = target.config
    if not config.mlp:
        return target
    if config.mlp < shape.intermediate_size:
        raise InputError(
            f"mlp={config.mlp}: the target has {shape.intermediate_size} units, and can only be"
            " inflated"
        )
    inflated = inflate(
        target,
        hidden_size=shape.hidden_size,
        intermediate_size=config.mlp,
        num_layers=shape.num_layers,
    )
    if inflated.config.num_kv_heads != shape.num_kv_heads:
        raise InputError(
            f"mlp={config.mlp}: this target would gain more heads, too, and with them keys and"
            " values"
        )
    return inflated


def run(config: LongContextConfig) -> tuple[MeasuredContexts, list[dict[str, Any]]]:
    """Return the measured parts, and the best choice for each context and number of rows."""
    if config.scheme not in _SCHEMES:
        raise InputError(f"scheme={config.scheme!r}: one of {', '.join(_SCHEMES)}")
    target = load_target(config)
    drafter = CompressedCache(scheme=_SCHEMES[config.scheme])
    texts = long_texts(config.source, config.target, max(config.contexts), max(config.batches))
    settings = {"sampling": Sampling(temperature=config.temperature), "eos_token_ids": ()}
    measured = measure_contexts(
        target,
        drafter,
        texts[:8],
        contexts=config.contexts,
        batches=config.batches,
        budgets=config.budgets,
        longest=config.longest,
        options=GenerationOptions(max_new_tokens=TRIAL_TOKENS, **settings),
    )
    rows = []
    for context in measured.contexts:
        for batch in measured.batches:
            best = measured.gains(context, batch)[0]
            row: dict[str, Any] = {"predicted": asdict(best)}
            if config.realise:
                row |= _realise(target, drafter, best, texts[:batch, :context], settings, config)
                forget_programs()
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    return measured, rows


def _realise(
    target: Any,
    drafter: CompressedCache,
    best: Gain,
    prompts: np.ndarray,
    settings: Any,
    config: LongContextConfig,
) -> dict[str, Any]:
    chosen = drafter.replace(budget=best.budget, draft=Chain(best.gamma))
    options = GenerationOptions(max_new_tokens=config.new_tokens, **settings)
    plain, speculative = decode_seconds(target, [None, chosen], prompts, options, config.repeats)
    tokens = len(prompts) * config.new_tokens
    return {
        "plain_tokens_per_s": tokens / plain,
        "tokens_per_s": tokens / speculative,
        "realised": plain / speculative,
    }


def main(config: LongContextConfig) -> None:
    """Print the tables, write the results and the picture."""
    if config.plot:
        pictures.check_path("plot", config.plot)
    measured, rows = run(config)
    console = Console(width=140)
    size = f", {config.mlp:,} MLP units" if config.mlp else ""
    console.print(
        contexts_table(
            f"{config.target}{size}, {config.scheme}; temperature {config.temperature:g}", measured
        )
    )
    if config.realise:
        table = Table(
            "context",
            "rows",
            "budget",
            "gamma",
            "plain tokens/s",
            "tokens/s",
            "realised",
            "predicted",
        )
        for row in rows:
            best = row["predicted"]
            numbers = (best["context"], best["batch"], best["budget"], best["gamma"])
            speeds = (row["plain_tokens_per_s"], row["tokens_per_s"])
            factors = (row["realised"], best["speedup"])
            table.add_row(
                *map(str, numbers), *(f"{x:.0f}" for x in speeds), *(f"{x:.2f}x" for x in factors)
            )
        console.print(table)
    critical = measured.critical_context()
    if critical is not None:
        console.print(f"Critical context: about {critical:,.0f} tokens.")
    results = {
        "settings": asdict(config),
        "gains": rows,
        "verify": [
            {"context": c, "batch": b, "verify": costs.verify}
            for (c, b), costs in measured.costs.items()
        ],
        "draft": [
            {"budget": budget, "batch": b, "seconds": s}
            for (budget, b), s in measured.draft_times.items()
        ],
        "survival": [
            {"context": c, "budget": budget, "survival": s}
            for (c, budget), s in measured.survival.items()
        ],
        "critical_context": critical,
    }
    if config.output:
        Path(config.output).write_text(json.dumps(results, indent=2) + "\n")
    if config.plot:
        pictures.save(picture(results), "plot", Path(config.plot))


def picture(results: dict[str, Any]) -> "Figure":
    """Draw speed-up by context and rows, predicted and, if it was timed, measured."""
    settings, gains = results["settings"], results["gains"]
    by_context: dict[str, dict[int, dict[int, float]]] = {"predicted": {}, "realised": {}}
    for row in gains:
        best = row["predicted"]
        by_context["predicted"].setdefault(best["context"], {})[best["batch"]] = best["speedup"]
        if "realised" in row:
            by_context["realised"].setdefault(best["context"], {})[best["batch"]] = row["realised"]
    size = f", {settings['mlp']:,} MLP units" if settings["mlp"] else ""
    title = (
        f"Drafting with a compressed cache ({settings['scheme']}), temperature"
        f" {settings['temperature']:g}{size}"
    )
    return draw_by_batch(
        title, by_context["predicted"], by_context["realised"], results["critical_context"]
    )


if __name__ == "__main__":
    try:
        main(tyro.cli(LongContextConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
