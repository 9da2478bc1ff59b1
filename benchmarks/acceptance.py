"""Acceptance lengths of a chain and of trees with the same depth: counts, not times.

python -m benchmarks.acceptance
python -m benchmarks.acceptance --target DIR --draft DIR --prompts FILE.jsonl
"""

import sys
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import specjax
from benchmarks.decode import prompts_of, read_texts
from specjax import text
from specjax.drafts.published import EAGLE_TREE
from specjax.drafts.shapes import Chain, DraftShape, DynamicTree, SampledTree, StaticTree
from specjax.errors import InputError
from specjax.evaluation import metrics
from specjax.models import hub
from specjax.sampling import Rule

METHODS: tuple[tuple[DraftShape, Rule], ...] = (
    (Chain(5), "block"),
    (Chain(5), "rejection"),
    (Chain(5), "coupled"),
    (Chain(8), "block"),
    (Chain(8), "rejection"),
    (Chain(8), "coupled"),
    (StaticTree(EAGLE_TREE), "independent"),
    (StaticTree(EAGLE_TREE), "coupled"),
    (DynamicTree(top_k=4, depth=5, nodes=26), "independent"),
    (DynamicTree(top_k=4, depth=5, nodes=26), "coupled"),
    (DynamicTree(top_k=10, depth=5, nodes=60), "independent"),
    (DynamicTree(top_k=10, depth=5, nodes=60), "coupled"),
    (SampledTree((3, 2, 1, 1, 1)), "independent"),
    (SampledTree((3, 2, 1, 1, 1)), "coupled"),
)
"""The measured shapes, of depth 5 and a longer chain, with every rule.

`RULE_NAMES` has the meaning of "independent" for trees.
"""


RULE_NAMES = {
    (StaticTree, "independent"): "matching",
    (DynamicTree, "independent"): "matching",
    (SampledTree, "independent"): "recursive rejection",
}


@dataclass(frozen=True)
class AcceptanceConfig:
    """Count the acceptance length of every shape.

    Attributes:
        target: directory or hub id of the target, or "embedded".
        draft: directory or hub id of the draft model, or "embedded:draft".
        prompts: JSON lines with "text"; by default the source of standard modules.
        count: number of prompts.
        context: tokens of a prompt.
        new_tokens: tokens to generate per prompt.
        temperature: temperatures to measure; 0 is greedy, where all rules are the same.
        top_p: top_p for each temperature.
    """

    target: str = "embedded"
    draft: str = "embedded:draft"
    prompts: str = ""
    count: int = 32
    context: int = 32
    new_tokens: int = 128
    temperature: tuple[float, ...] = (0.0, 1.0, 0.7)
    top_p: tuple[float, ...] = (1.0, 1.0, 0.9)


def read_prompts(config: AcceptanceConfig) -> np.ndarray:
    """Return the prompts ``[count, context]``."""
    tokenizer = text.load_tokenizer(hub.locate(config.target))
    texts = [np.asarray(text.encode(tokenizer, sample)) for sample in read_texts(config.prompts)]
    return prompts_of(texts, config.count, config.context)


def run(config: AcceptanceConfig) -> list[dict[str, Any]]:
    """Return a row for each shape and rule, with an acceptance length per temperature."""
    if len(config.temperature) != len(config.top_p):
        raise InputError(
            f"top_p={config.top_p}: give one for each temperature, of which there are"
            f" {len(config.temperature)}"
        )
    target = specjax.Target.from_pretrained(config.target, dtype=np.float32)
    model = specjax.Target.from_pretrained(config.draft, dtype=np.float32)
    prompts = read_prompts(config)
    rows = []
    for shape, rule in METHODS:
        drafter = specjax.DraftModel(model, draft=shape)
        row: dict[str, Any] = {
            "draft": str(shape),
            "rule": RULE_NAMES.get((type(shape), rule), rule),
            "nodes": shape.nodes,
        }
        for temperature, top_p in zip(config.temperature, config.top_p, strict=True):
            result = specjax.generate(
                target,
                drafter,
                prompts,
                max_new_tokens=config.new_tokens,
                sampling=specjax.Sampling(temperature=temperature, top_p=top_p),
                key=jax.random.key(0),
                rule=rule,
            )
            setting = f"T={temperature:g}" + (f", top-p {top_p:g}" if top_p < 1 else "")
            row[setting] = metrics.summarise(result.stats).acceptance_length
        rows.append(row)
    return rows


def share_of_loops(target: specjax.Target, prompts: np.ndarray, new_tokens: int = 256) -> float:
    """Return the share of greedy texts whose last 64 tokens repeat a period of at most 16."""
    result = specjax.generate(target, None, prompts, max_new_tokens=new_tokens, eos_token_ids=())
    ends = result.tokens[:, -64:]
    return float(
        np.mean(np.any([np.all(ends[:, n:] == ends[:, :-n], axis=1) for n in range(1, 17)], axis=0))
    )


def main(config: AcceptanceConfig) -> None:
    """Print the table, and how often greedy text loops."""
    rows = run(config)
    table = Table(
        *rows[0],
        title=f"acceptance length: {config.target}, {config.draft}, {config.count} prompts",
    )
    for row in rows:
        table.add_row(
            *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    console = Console(width=120)
    console.print(table)
    loops = share_of_loops(
        specjax.Target.from_pretrained(config.target, dtype=np.float32), read_prompts(config)
    )
    console.print(f"greedy texts of 256 tokens that end in a loop: {loops:.0%}")


if __name__ == "__main__":
    try:
        main(tyro.cli(AcceptanceConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
