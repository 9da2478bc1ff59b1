"""Cost and benefit of quantized weights: quality, equality of drafted texts, and speed.

    python -m benchmarks.quantization --parts quality texts --targets embedded DIR --prompts ""
    STORIES.jsonl
    python -m benchmarks.quantization --parts quality --weights float32 int4 int4-calibrated
    --targets DIR \
        --prompts STORIES.jsonl --calibration OTHERS.jsonl
    python -m benchmarks.quantization --parts speed --llama PYTHON         # an interpreter with
    llama-cpp-python

Quality is the loss on text, and how much of its acceptance an EAGLE-3 drafter keeps that was
trained for the model in floats. Texts are greedy, plain and drafted: the number that differ, and
the difference of logits there. Speed is measured on the target inflated to about 91M, one row at a
time, with everything interleaved; llama.cpp has the same weights as q8_0.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import specjax
from benchmarks.decode import machine, prompts_of, read_texts
from benchmarks.serving_models import write_gguf
from specjax import text
from specjax.assets import embedded
from specjax.demo import OnInflated, inflate
from specjax.drafters import Drafter
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.errors import InputError
from specjax.evaluation import metrics, same_texts
from specjax.models import hub
from specjax.models.calibration import calibrate, windows
from specjax.models.transformer import Target
from specjax.progress import show_waits, track
from specjax.training.documents import read_documents

Weights = Literal[
    "float32",
    "bfloat16",
    "int8",
    "w8a8",
    "int4",
    "fp8",
    "int8-calibrated",
    "w8a8-calibrated",
    "int4-calibrated",
    "fp8-calibrated",
]
WEIGHTS: tuple[Weights, ...] = ("float32", "bfloat16", "int8", "w8a8", "int4", "fp8")


@dataclass(frozen=True)
class QuantizationConfig:
    """Measure quantized weights.

    Attributes:
        parts: parts to measure.
        targets: directories or hub ids.
        prompts: JSON lines with "text", one file for each target; empty: the source of standard
            modules.
        calibration: texts for weights that are "-calibrated", one source for each target, as
            for ``convert --calibrate``; missing or empty: all standard modules except those
            of ``prompts``. They must not include the measured text.
        weights: weights to compare.
        tokens: tokens of the text for quality.
        texts: number of greedy texts for each drafter and kind of weights.
        new_tokens: tokens of each text, and of each timed one.
        inflate: hidden size, MLP size and layers of the copy of the first target whose speed is
            measured.
        draft: draft model of the first target.
        repeats: timed runs of everything.
        llama: an interpreter with llama-cpp-python and gguf; empty: llama.cpp is left out.
        output: .json file for the results; if empty, they are only printed.
    """

    parts: tuple[Literal["quality", "texts", "speed"], ...] = ("quality", "texts", "speed")
    targets: tuple[str, ...] = ("embedded",)
    prompts: tuple[str, ...] = ("",)
    calibration: tuple[str, ...] = ()
    weights: tuple[Weights, ...] = WEIGHTS
    tokens: int = 32_768
    texts: int = 1000
    new_tokens: int = 64
    inflate: tuple[int, int, int] = (768, 2304, 13)
    draft: str = "embedded:draft"
    repeats: int = 5
    llama: str = ""
    output: str = ""


def load(name: str, weights: Weights, calibration: str = "") -> Target:
    """Load a target with the given weights."""
    if weights in ("float32", "bfloat16"):
        return Target.from_pretrained(name, dtype=jnp.dtype(weights))
    scheme, *calibrated = weights.split("-")
    if calibrated:
        tokenizer = text.load_tokenizer(hub.locate(name, weights=False))
        texts = [text.encode(tokenizer, sample) for sample in calibration_texts(calibration)]
        return calibrate(Target.from_pretrained(name, dtype=jnp.float32), scheme, windows(texts))
    return Target.from_pretrained(name, dtype=jnp.float32, weights=weights)


def _texts_of(config: QuantizationConfig) -> list[tuple[str, str, str]]:
    """Return the name, prompts and calibration text of each target."""
    calibration = config.calibration or ("",) * len(config.targets)
    return list(zip(config.targets, config.prompts, calibration, strict=True))


def calibration_texts(source: str) -> list[str]:
    """Return the texts of a source, or the standard modules that `read_texts` does not read."""
    measured = set() if source else set(read_texts(""))
    texts = [document.text or "" for document in read_documents(source or "stdlib", "calibration")]
    return [sample for sample in texts if sample and sample not in measured]


def tokens_of(name: str, prompts: str) -> list[np.ndarray]:
    """Return the texts as the target's tokens."""
    tokenizer = text.load_tokenizer(hub.locate(name, weights=False))
    return [np.asarray(text.encode(tokenizer, sample)) for sample in read_texts(prompts)]


# --- quality --------------------------------------------------------------------------------------


@jax.jit
def _loss(target: Target, tokens: jax.Array) -> jax.Array:
    logits = target.forward(tokens[:, :-1])[0].logits
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1))


def quality(config: QuantizationConfig) -> list[dict[str, Any]]:
    """Measure the loss with each kind of weights, and the acceptance of an EAGLE-3 drafter.

    Acceptance is measured only on the embedded target.
    """
    rows = []
    for name, prompts, calibration in _texts_of(config):
        texts, window = tokens_of(name, prompts), 256
        batches = prompts_of(texts, max(config.tokens // window, 16), window).reshape(
            -1, 16, window
        )
        baseline: dict[str, float] = {}
        for weights in track(config.weights, f"quality of {name}: {{}}"):
            target = load(name, weights, calibration)
            loss = float(np.mean([_loss(target, batch) for batch in batches]))
            row: dict[str, Any] = {"target": name, "weights": weights, "loss": loss}
            if name == "embedded":
                drafter = specjax.Eagle3.from_pretrained(
                    embedded("eagle3"), draft=Chain(5), dtype=target.dtype
                )
                result = specjax.generate(
                    target, drafter, prompts_of(texts, 64, 32), max_new_tokens=config.new_tokens
                )
                row["acceptance_length"] = metrics.summarise(result.stats).acceptance_length
            baseline = baseline or row
            row["loss_change"] = loss / baseline["loss"] - 1
            rows.append(row)
    return rows


# --- texts ----------------------------------------------------------------------------------------


def texts(config: QuantizationConfig) -> list[dict[str, Any]]:
    """Count the greedy texts that differ from plain ones, by drafter, weights and batch size."""
    rows = []
    for name, prompts, calibration in _texts_of(config):
        pieces = prompts_of(tokens_of(name, prompts), config.texts, 16)
        batches = [
            (batch, np.full(len(batch), 16))
            for batch in np.array_split(pieces, max(config.texts // 50, 1))
        ]
        for weights in config.weights:
            target = load(name, weights, calibration)
            drafters = _drafters(name, target)
            for title in track(list(drafters), f"texts of {name}, {weights}: {{}}"):
                comparison = same_texts.compare(
                    target,
                    drafters[title],
                    batches,
                    temperature=0.0,
                    max_new_tokens=config.new_tokens,
                    rounding=0.0,
                    key=jax.random.key(0),
                )
                margins = [parting.margin for parting in comparison.partings]
                row = {
                    "target": name,
                    "weights": weights,
                    "drafter": title,
                    "texts": comparison.texts,
                    "parted": len(margins),
                }
                rows.append(
                    row | {"largest_margin": max(margins, default=0.0), "lag": comparison.lag}
                )
            plain = partial(
                specjax.generate, target, None, max_new_tokens=config.new_tokens, eos_token_ids=()
            )
            indices = track(range(len(pieces)), f"texts of {name}, {weights}: one by one")
            alone = [plain(pieces[i : i + 1]).tokens[0] for i in indices]
            together = [plain(batch).tokens for batch, _ in batches]
            parted = int((np.stack(alone) != np.concatenate(together)).any(axis=1).sum())
            rows.append(
                {
                    "target": name,
                    "weights": weights,
                    "drafter": "rows alone",
                    "texts": len(alone),
                    "parted": parted,
                }
            )
    return rows


def _drafters(name: str, target: Target) -> dict[str, Drafter]:
    drafters: dict[str, Drafter] = {
        "prompt lookup, chain of 4": specjax.PromptLookup(draft=Chain(4)),
        "early exit, tree of 8": specjax.EarlyExit(
            layers=2, draft=DynamicTree(top_k=2, depth=4, nodes=8)
        ),
    }
    if name == "embedded":
        eagle3 = specjax.Eagle3.from_pretrained(
            embedded("eagle3"), draft=Chain(5), dtype=target.dtype
        )
        drafters["EAGLE-3, chain of 5"] = eagle3
        drafters["EAGLE-3, tree of 26"] = replace(
            eagle3, draft=DynamicTree(top_k=4, depth=5, nodes=26)
        )
    return drafters


# --- speed ----------------------------------------------------------------------------------------


def speed(config: QuantizationConfig) -> list[dict[str, Any]]:
    """Measure tokens per second: plain, with draft-model chains, with EAGLE-3, and in llama.cpp."""
    hidden, mlp, layers = config.inflate
    small = Target.from_pretrained(config.targets[0], dtype=jnp.float32)
    inflated = inflate(small, hidden_size=hidden, intermediate_size=mlp, num_layers=layers)
    draft = Target.from_pretrained(config.draft, dtype=jnp.float32)
    pieces = prompts_of(tokens_of(config.targets[0], config.prompts[0]), 4, 32)
    runs: dict[tuple[str, str], Callable[[np.ndarray], int]] = {}
    for weights in config.weights:
        # A CPU converts the first two at every product. Calibrated weights are as fast as others.
        if weights in ("bfloat16", "fp8") or "-" in weights:
            continue
        quantized = weights != "float32"
        target = inflated.quantize(weights) if quantized else inflated
        quantized_draft = draft.quantize(weights) if quantized else draft
        drafters: dict[str, Drafter | None] = {"plain": None}
        for length in (2, 3, 4, 6):
            drafters[f"draft model, chain of {length}"] = specjax.DraftModel(
                quantized_draft, draft=Chain(length)
            )
        if config.targets[0] == "embedded":
            eagle3 = specjax.Eagle3.from_pretrained(
                embedded("eagle3"), draft=Chain(5), dtype=jnp.float32
            )
            drafters["EAGLE-3, chain of 5"] = OnInflated.of(eagle3, small)
        for name, drafter in drafters.items():
            runs[weights, name] = _ours(target, drafter, config.new_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        if config.llama:
            for name, run in _llama(config, inflated, Path(scratch)).items():
                runs["q8_0", name] = run
        rates: dict[tuple[str, str], list[float]] = {name: [] for name in runs}
        for repeat in track(range(config.repeats + 1), "speed"):
            for name, run in runs.items():
                started = time.perf_counter()
                emitted = sum(run(piece) for piece in pieces)
                if repeat:  # the first compiles, and is not counted
                    rates[name].append(emitted / (time.perf_counter() - started))
    plain = median(rates["float32", "plain"])
    return [
        {
            "weights": weights,
            "method": name,
            "tokens_per_second": median(speeds),
            "spread": [min(speeds), max(speeds)],
            "of_plain_float32": median(speeds) / plain,
        }
        for (weights, name), speeds in rates.items()
    ]


def _ours(target: Target, drafter: Drafter | None, new_tokens: int) -> Callable[[np.ndarray], int]:
    def run(prompt: np.ndarray) -> int:
        result = specjax.generate(
            target, drafter, prompt[None], max_new_tokens=new_tokens, eos_token_ids=()
        )
        return int(result.lengths[0]) - len(prompt)

    return run


_LLAMA = """
import json, sys, time
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
options = {"n_ctx": 512, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
models = {"plain": Llama(sys.argv[1], **options)}
prompt_lookup = LlamaPromptLookupDecoding(num_pred_tokens=4)
models["prompt lookup"] = Llama(sys.argv[1], **options, draft_model=prompt_lookup)
print("ready", flush=True)
for line in sys.stdin:
    name, tokens, count = json.loads(line)
    model, made = models[name], []
    model.reset()
    for token in model.generate(tokens, temp=0.0, repeat_penalty=1.0, reset=True):
        made.append(token)
        if len(made) == count:
            break
    print(json.dumps(made), flush=True)
"""


def _llama(
    config: QuantizationConfig, target: Target, scratch: Path
) -> dict[str, Callable[[np.ndarray], int]]:
    """Run llama.cpp with 8-bit weights in a separate process."""
    import shutil

    target.save_pretrained(scratch / "target")
    shutil.copy(hub.locate(config.targets[0]) / "tokenizer.json", scratch / "target")
    write_gguf(scratch / "target", scratch / "target.gguf", "q8_0")
    process = subprocess.Popen(
        [config.llama, "-c", _LLAMA, str(scratch / "target.gguf")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise InputError(
            f"llama={config.llama!r}: cannot run llama.cpp: install llama-cpp-python and gguf there"
        )

    def method(name: str) -> Callable[[np.ndarray], int]:
        def run(prompt: np.ndarray) -> int:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([name, prompt.tolist(), config.new_tokens]) + "\n")
            process.stdin.flush()
            return len(json.loads(process.stdout.readline()))

        return run

    return {name: method(name) for name in ("plain", "prompt lookup")}


def main(config: QuantizationConfig) -> None:
    """Print and write the tables."""
    results: dict[str, Any] = {"machine": machine(), "settings": asdict(config)}
    for part in config.parts:
        results[part] = rows = {"quality": quality, "texts": texts, "speed": speed}[part](config)
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = Table(*columns, title=part)
        for row in rows:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        Console(width=160).print(table)
        if config.output:
            Path(config.output).write_text(json.dumps(results, indent=2) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    show_waits()
    try:
        main(tyro.cli(QuantizationConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
