"""The acceptance of each training method on a few texts that it sees in every step.

    python -m benchmarks.overfit

The target writes the texts itself, greedily, so each of their tokens follows from the tokens before
it. Every method reads, directly or through the target's hidden states, all tokens before the place
from which it drafts. So it can reach the whole depth of its chain: that many tokens, and the
target's own token, in every step of decoding. A method that stays far below has a fault, or too few
steps.

The metric is that of the training loop, the greedy acceptance length of chains of five. It is exact
for texts of the target's own. A model that is trained as a whole, for which the loop has no such
metric, is compared with the target token by token, as a draft model.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import specjax
from specjax import text
from specjax.errors import InputError
from specjax.models import hub
from specjax.models.transformer import Target
from specjax.training import methods
from specjax.training.config import OptimizerConfig
from specjax.training.contract import Batch, Mean, StudentInputs, TrainingMethod, Windows
from specjax.training.objectives.ahead import SIMULATED_STEPS, agreement, ahead, chain_metrics
from specjax.training.objectives.whole_model import ModelSizes
from specjax.training.objectives.windows import read
from specjax.training.optimizer import make_optimizer
from specjax.training.step import evaluation_step, initial_state, make_batch, train_step

PROMPTS = (
    "def read_lines(path):",
    "class Node:\n    def __init__",
    "import os\nimport sys\n\n",
    "    for name in sorted(",
    "try:\n    value = int(",
    "if __name__ == '__main__",
    "    @property\n    def ",
    "with open(filename, 'rb')",
)
"""The beginnings of the texts. Each is cut to the same number of tokens."""

PROMPT_TOKENS = 4


@dataclass(frozen=True)
class OverfitConfig:
    """Train every method on a few texts, and compare its acceptance length with its bound.

    Attributes:
        target: directory or hub id of the target.
        methods: names of methods; empty for all.
        texts: the number of texts, which are one batch.
        window: tokens of a text.
        steps: the number of steps.
        learning_rate: the largest learning rate, of AdamW.
        enough: the share of the bound that a method should reach.
        seed: the seed of the weights.
        output: write the results to this JSON file.
    """

    target: str = "embedded"
    methods: tuple[str, ...] = ()
    texts: int = 4
    window: int = 48
    steps: int = 300
    learning_rate: float = 3e-3
    enough: float = 0.95
    seed: int = 0
    output: str = ""


def all_methods(target: str) -> dict[str, TrainingMethod]:
    """Return every registered method by its name, for chains of `SIMULATED_STEPS` tokens.

    A draft model has 4 layers, and a drafter with layers one.
    """
    depth, block = SIMULATED_STEPS, SIMULATED_STEPS + 1
    sizes = ModelSizes(hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4)
    of_blocks: dict[str, Any] = {"target": target, "layers": 1, "anchors": 48}
    of_whole: list[TrainingMethod] = [
        methods.Lm(model=sizes),
        methods.Distill(target=target, model=sizes),
        methods.LmMTP(model=sizes, modules=depth),
    ]
    of_features: list[TrainingMethod] = [
        methods.Eagle1Training(target=target),
        methods.HassTraining(target=target, steps=depth),
        methods.Eagle3Training(target=target, steps=depth),
        methods.PEagleTraining(target=target, layers=1, depths=depth),
        methods.MTPTraining(target=target, steps=depth),
        methods.MedusaTraining(target=target, heads=depth),
        methods.MoATraining(target=target, shortest_block=depth, longest_block=14),
        methods.Gemma4AssistantTraining(
            target=target, hidden_size=192, intermediate_size=512, layers=1, steps=depth
        ),
    ]
    all_of_blocks: list[TrainingMethod] = [
        methods.DFlashTraining(**of_blocks, block_size=block),
        methods.DFlash2Training(**of_blocks, block_size=block),
        methods.JetSpecTraining(**of_blocks, block_size=block),
        methods.DSparkTraining(**of_blocks, block_size=depth),
    ]
    every = of_whole + of_features + all_of_blocks
    return {method.name: method for method in every}  # pyright: ignore[reportAttributeAccessIssue]


def own_texts(target: Target, tokenizer: Any, texts: int, window: int) -> Windows:
    """Return windows that the target has written greedily. Their prompts do not count."""
    prompts = np.array(
        [text.encode(tokenizer, prompt)[:PROMPT_TOKENS] for prompt in PROMPTS[:texts]]
    )
    result = specjax.generate(target, None, prompts, max_new_tokens=window + 1 - PROMPT_TOKENS)
    tokens = np.asarray(result.tokens)
    return {
        "tokens": tokens.astype(np.int32),
        "segments": np.zeros(tokens.shape, np.int32),
        "loss_mask": np.broadcast_to(
            np.arange(window) >= PROMPT_TOKENS - 1, (texts, window)
        ).copy(),
    }


@jax.jit
def as_draft_model(student: Target, batch: Batch, target: Target) -> Mapping[str, Mean]:
    """Return the metrics of a model that drafts for the target."""
    logits = student.head(read(student, batch)[0].hidden)
    expected = target.head(read(target, batch)[0].hidden)
    right, accepted = agreement(logits, expected)
    # From place t, step k predicts what the model predicts at place t + 1 + k.
    steps = ((ahead(right, 1 + step), ahead(accepted, 1 + step)) for step in range(SIMULATED_STEPS))
    return chain_metrics(batch, steps)


def acceptance_length(
    method: TrainingMethod, student: Any, batch: Batch, target: Target
) -> tuple[float, float]:
    """Return the greedy acceptance length of a student, and that at temperature 1."""
    if isinstance(student, Target):
        metrics = as_draft_model(student, batch, target)
    else:
        metrics = evaluation_step(student, batch, target, method=method)
    return (
        float(metrics["acceptance_length"].value),
        float(metrics["acceptance_length_sampled"].value),
    )


def overfit(
    config: OverfitConfig, method: TrainingMethod, target: Target, tokenizer: Any, windows: Windows
) -> dict[str, float]:
    """Train a method, and return the acceptance lengths before and after, and the seconds."""
    counts = np.bincount(windows["tokens"].reshape(-1), minlength=target.config.vocab_size)
    inputs = StudentInputs(tokenizer.backend_tokenizer, counts, target)
    student: Any = method.init(jax.random.key(config.seed), inputs)
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=config.learning_rate, warmup_steps=20, weight_decay=0.0),
        config.steps,
    )
    started = time.perf_counter()
    state = initial_state(method, student, optimizer)
    evaluated = make_batch(windows, jax.random.key(0), 1.0)
    before, _ = acceptance_length(method, state.student, evaluated, target)
    metrics: Mapping[str, Any] = {}
    for step in range(config.steps):
        batch = make_batch(windows, jax.random.key(1 + step), step / config.steps)
        state, metrics = train_step(state, batch, target, method=method, optimizer=optimizer)
    after, sampled = acceptance_length(method, state.student, evaluated, target)
    return {
        "before": before,
        "after": after,
        "sampled": sampled,
        "loss": float(metrics["loss"]),
        "seconds": time.perf_counter() - started,
    }


def run(config: OverfitConfig) -> dict[str, dict[str, float]]:
    """Return the results of each method by name."""
    available = all_methods(config.target)
    names = config.methods or tuple(available)
    for name in names:
        if name not in available:
            raise InputError(f"methods={name!r}: give some of {', '.join(available)}")
    if not 1 <= config.texts <= len(PROMPTS):
        raise InputError(f"texts={config.texts}: give 1 to {len(PROMPTS)}")
    source = hub.locate(config.target, weights=True)
    target, tokenizer = Target.from_pretrained(source), text.load_tokenizer(source)
    target = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), target)
    windows = own_texts(target, tokenizer, config.texts, config.window)
    bound = 1.0 + SIMULATED_STEPS
    results: dict[str, dict[str, float]] = {}
    for name in names:
        results[name] = overfit(config, available[name], target, tokenizer, windows)
        share = results[name]["after"] / bound
        results[name] |= {"bound": bound, "share": share}
        print(f"{name}: {results[name]}", flush=True)
        if config.output:
            Path(config.output).write_text(json.dumps(results, indent=1))
    return results


def main(config: OverfitConfig) -> None:
    """Print the table."""
    results = run(config)
    table = Table(
        "method",
        "before",
        "after",
        "bound",
        "share",
        "at temperature 1",
        "seconds",
        title="overfit",
    )
    for name, result in results.items():
        mark = "" if result["share"] >= config.enough else " *"
        table.add_row(
            name,
            f"{result['before']:.2f}",
            f"{result['after']:.2f}",
            f"{result['bound']:.0f}",
            f"{result['share']:.3f}{mark}",
            f"{result['sampled']:.2f}",
            f"{result['seconds']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    try:
        main(tyro.cli(OverfitConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
