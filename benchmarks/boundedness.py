"""Agreement of a drafter that goes on alone with the text that the target would have written.

python -m benchmarks.boundedness --target TARGET --runs "MoA=runs/moa_*/best"
"EAGLE-1=runs/eagle1_*/best"

For each prompt the target writes some tokens, greedily. Then every drafter drafts one long chain,
and the target continues for as many tokens. Agreement is the share of equal positions. After the
first difference more follow, so a drafter agrees for a while and then writes a different text. This
is table 4 of Mixture of Attentions (arXiv 2410.03804), where the server is lost in the middle of an
answer.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import specjax
from benchmarks.decode import prompts_of, read_texts
from benchmarks.drafters import load
from specjax import decoding, text
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Drafter
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.models import hub
from specjax.sampling import Sampling


@dataclass(frozen=True)
class BoundednessConfig:
    """Measure drafters that go on alone.

    Attributes:
        target: directory or hub id of the target.
        runs: "NAME=GLOB" each; the directories of a glob are runs of one method with different
            seeds.
        prompts: JSON lines with "text"; by default the source of standard modules.
        count: number of prompts.
        context: tokens of a prompt.
        written: tokens that the target writes first.
        alone: tokens that the drafter then drafts alone.
        output: .json file for the results; if empty, they are only printed.
    """

    target: str = "embedded"
    runs: tuple[str, ...] = (
        "draft model=embedded:draft",
        "EAGLE-3=embedded:eagle3",
        "MTP=embedded:mtp",
    )
    prompts: str = ""
    count: int = 64
    context: int = 16
    written: int = 50
    alone: int = 20
    output: str = ""


def draft_alone(
    target: specjax.Target, drafter: Drafter, texts: np.ndarray, tokens: int
) -> np.ndarray:
    """Return ``[B, tokens]`` one greedy chain after each of ``texts [B, P]``."""
    long = replace(drafter, draft=Chain(tokens))  # pyright: ignore[reportArgumentType]
    options = GenerationOptions(
        max_new_tokens=tokens + 1, eos_token_ids=(), sampling=Sampling(temperature=0.0)
    )
    long, state = decoding.start(target, long, texts, None, options)
    draft, _ = jax.jit(decoding.propose_step)(target, long, state)
    return np.asarray(draft.tokens)[:, 1:]


def run(config: BoundednessConfig) -> list[dict[str, Any]]:
    """Return a row for each name."""
    if min(config.count, config.context, config.written, config.alone) < 1:
        raise InputError("count, context, written and alone: must be at least 1")
    target = specjax.Target.from_pretrained(config.target, dtype=np.float32)
    tokenizer = text.load_tokenizer(hub.locate(config.target))
    texts = [np.asarray(text.encode(tokenizer, sample)) for sample in read_texts(config.prompts)]
    prompts = prompts_of(texts, config.count, config.context)
    # No token ends a text here: what came after it would be filler, and equal to nothing.
    whole = specjax.generate(
        target, None, prompts, max_new_tokens=config.written + config.alone, eos_token_ids=()
    ).tokens
    before, after = whole[:, : -config.alone], whole[:, -config.alone :]
    rows = []
    for name, seeds in load(config.runs, target).items():
        same = [draft_alone(target, drafter, before, config.alone) == after for drafter in seeds]
        agreed = [np.cumprod(matches, axis=1).sum(axis=1).mean() for matches in same]
        rows.append(
            {
                "method": name,
                "agreement": mean(float(matches.mean()) for matches in same),
                "agreements": [float(matches.mean()) for matches in same],
                "until_first_difference": mean(float(matches) for matches in agreed),
                "by_place": np.mean([matches.mean(axis=0) for matches in same], axis=0).tolist(),
            }
        )
    return rows


def main(config: BoundednessConfig) -> None:
    """Print and write the table."""
    rows = run(config)
    places = [place for place in (1, 2, 3, 5, 10, 20) if place <= config.alone]
    table = Table(
        "method",
        f"agreement over {config.alone}",
        "of each seed",
        "until the first difference",
        *(f"at {place}" for place in places),
        title=(
            f"{config.target}: {config.count} texts, drafters alone after {config.written} tokens"
        ),
    )
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['agreement']:.2f}",
            " ".join(f"{agreement:.2f}" for agreement in row["agreements"]),
            f"{row['until_first_difference']:.1f}",
            *(f"{row['by_place'][place - 1]:.2f}" for place in places),
        )
    Console(width=140).print(table)
    if config.output:
        Path(config.output).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(BoundednessConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
