"""The demo: text from the embedded models with accepted tokens in colour, and a table of speeds."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from specjax import pipeline, text
from specjax.assets import embedded
from specjax.decoding.options import GenerationOptions
from specjax.demo import Measured, MethodComparison, OnInflated, compiling, inflate
from specjax.drafters import MTP, Drafter, DraftModel, Eagle3, EarlyExit, PromptLookup
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree
from specjax.errors import InputError
from specjax.models.params import count
from specjax.models.transformer import Target
from specjax.progress import waiting

PROMPTS = (
    'def walk(self, node):\n    """Visit every child of the node."""\n    for',
    'def send(self, data):\n    """Send data to the server."""\n    if self.sock is',
    'def get(self, key, default=None):\n    """Return the value for key, or default."""\n    try',
)
"""Parts of Python files, cut inside a line, where the tokenizer separates tokens in any case."""

INFLATED = {"hidden_size": 640, "intermediate_size": 1920, "num_layers": 12}
"""The target's size in the demo. At its own size, a step would be mostly overhead."""


@dataclass(frozen=True)
class DemoConfig:
    """Show the embedded models at work, the target inflated to a realistic cost; takes a minute.

    Attributes:
        all: measure more methods, each with sampling and greedily; takes several minutes.
        max_new_tokens: maximum number of tokens per prompt; the default is 40, or 96 with all.
        temperature: sampling temperature of the text and the table; 0 is greedy. The default is 0,
            or 0.7 with all.
        seed: random seed.
        repeats: number of timed runs of each method, of which the median is shown; the default is
            2, or 3 with all.
    """

    all: bool = False
    max_new_tokens: int | None = None
    temperature: float | None = None
    seed: int = 0
    repeats: int | None = None


_USUAL = {"max_new_tokens": 40, "temperature": 0.0, "repeats": 2}
_USUAL_OF_ALL = {"max_new_tokens": 96, "temperature": 0.7, "repeats": 3}

PLAIN, SHOWN = "plain", "EAGLE-3"
"""The baseline, and the method whose text is shown in colour."""

GREEDY = "greedy"
"""The name of greedy decoding in the table."""

FEW = (SHOWN, PLAIN, "draft model", "MTP", "prompt lookup")
"""The methods that are measured without ``all``."""


def methods(target: Target, small: Target) -> dict[str, Drafter | None]:
    """Return the methods of the table, by name, for a target that was inflated from ``small``."""
    draft = Target.from_pretrained(embedded("draft"))
    eagle3 = Eagle3.from_pretrained(embedded("eagle3"))
    return {
        PLAIN: None,
        "draft model": DraftModel(draft, draft=Chain(4)),
        "draft model, adaptive": DraftModel(draft, draft=Chain(12, stop_below=0.4)),
        "draft model, tree": DraftModel(draft, draft=SampledTree((2, 2, 1))),
        "EAGLE-3": OnInflated.of(replace(eagle3, draft=Chain(4)), small),
        "EAGLE-3, tree": OnInflated.of(
            replace(eagle3, draft=DynamicTree(top_k=2, depth=4, nodes=8)), small
        ),
        "MTP": OnInflated.of(MTP.from_pretrained(embedded("mtp"), draft=Chain(5)), small),
        "prompt lookup": PromptLookup(draft=Chain(3)),
        "early exit": EarlyExit(layers=target.config.num_layers // 3, draft=Chain(2)),
    }


def run_demo(config: DemoConfig) -> None:
    """Run ``specjax demo``."""
    usual = _USUAL_OF_ALL if config.all else _USUAL
    config = replace(
        config, **{name: value for name, value in usual.items() if getattr(config, name) is None}
    )
    repeats = config.repeats or 0
    if not 1 <= repeats <= 1000:
        raise InputError(f"repeats={repeats}: must be at least 1 and at most 1000")
    ways = _ways(config)  # refuse invalid options before any weights are read
    console = Console(highlight=False)
    with waiting("loading the models"):
        stage = _Stage.load(console)
    chosen = {
        name: drafter for name, drafter in stage.drafters.items() if config.all or name in FEW
    }
    comparisons = [
        MethodComparison(way, stage.target, *text.pad(stage.prompts), options)
        for way, options in ways.items()
    ]
    with waiting(f"compiling {SHOWN}"):  # compiled alone, because its text is shown first
        comparisons[0].compile(chosen[SHOWN])
    with compiling(comparisons, chosen) as wait_for_all:
        console.rule(f"{SHOWN}: [bold green]accepted draft tokens[/], and the target's tokens")
        for row in range(2):
            stage.show(comparisons[0], chosen[SHOWN], row)
        wait_for_all()
    measured = {comparison.way: comparison.measure(chosen, repeats) for comparison in comparisons}
    console.rule("how fast each method is")
    console.print(_table(measured))
    console.print(_explanation(config, stage, measured))
    console.print(_what_next(), soft_wrap=True)


def _ways(config: DemoConfig) -> dict[str, GenerationOptions]:
    """Return the options of each way to sample, by name; the first is that of the coloured text."""
    ways = {}
    for temperature in dict.fromkeys(
        [config.temperature, 0.0] if config.all else [config.temperature]
    ):
        options = pipeline.settings(
            max_new_tokens=config.max_new_tokens, temperature=temperature, seed=config.seed
        )
        options.sampling.rows(1)
        ways[f"T={temperature:g}" if temperature else GREEDY] = options
    return ways


@dataclass(frozen=True)
class _Stage:
    """The models, methods and prompts that are shown, and the console.

    Attributes:
        console: the console.
        small: the target as it was trained.
        target: the inflated target.
        drafters: the drafters of all methods, by name.
        tokenizer: the tokenizer of all models.
        prompts: the token ids of each prompt.
    """

    console: Console
    small: Target
    target: Target
    drafters: dict[str, Drafter | None]
    tokenizer: Any
    prompts: list[list[int]]

    @classmethod
    def load(cls, console: Console) -> "_Stage":
        directory = embedded("target")
        small = Target.from_pretrained(directory)
        target = inflate(small, **INFLATED)
        tokenizer = text.load_tokenizer(directory)
        prompts = [text.encode(tokenizer, prompt) for prompt in PROMPTS]
        return cls(console, small, target, methods(target, small), tokenizer, prompts)

    def show(self, comparison: MethodComparison, drafter: Drafter | None, row: int) -> None:
        """Print a prompt dimmed, then its output as it comes, with accepted tokens in green."""
        prompt = self.prompts[row]
        shown, accepted, stream = len(prompt), 0, text.TextStream(self.tokenizer, prompt)
        self._write(self.tokenizer.decode(prompt, skip_special_tokens=True), "dim")
        for result in comparison.stream(drafter, row):
            new, length = result.tokens[0], int(result.lengths[0])
            drafts = int(result.stats.accepted[0]) - accepted
            accepted += drafts
            for index in range(shown, length):
                self._write(
                    stream.push(new[index : index + 1]),
                    "bold green" if index < shown + drafts else "",
                )
            shown = length
        self._write(stream.push([], last=True) + "\n\n", "")

    def _write(self, piece: str, style: str) -> None:
        self.console.print(piece, style=style, end="", markup=False, emoji=False, soft_wrap=True)
        self.console.file.flush()


def _table(measured: dict[str, dict[str, Measured]]) -> Table:
    """Return a table with a row per method: speed, speed-up and acceptance length for each way."""
    table = Table(
        "\nmethod", *(f"{way}\n{what}" for way in measured for what in ("tok/s", "gain", "length"))
    )
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    methods = list(next(iter(measured.values())))
    for name in methods:
        cells = []
        for of_way in measured.values():
            speed = of_way[name].speed
            cells += [
                f"{speed:,.0f}",
                f"{speed / of_way[PLAIN].speed:.2f}x",
                f"{of_way[name].length:.2f}",
            ]
        table.add_row(name, *cells)
    return table


def _explanation(
    config: DemoConfig, stage: _Stage, measured: dict[str, dict[str, Measured]]
) -> str:
    """Return what the columns mean, and what was measured."""
    small, large = (count(model.params) / 1e6 for model in (stage.small, stage.target))
    return (
        f"{len(stage.prompts)} prompts one after another, {config.max_new_tokens} tokens each at"
        f" most; median of {config.repeats} interleaved runs on {jax.devices()[0].device_kind}."
        " Tok/s is tokens per second, gain is over plain decoding, and length is acceptance"
        f" length: tokens per forward pass of the target. The target of {small:.1f}M parameters is"
        f" padded with zeros to {large:.0f}M for a realistic cost: the text and the acceptance"
        f" lengths stay the same.{_sameness(measured.get(GREEDY, {}))}"
    )


def _sameness(measured: Mapping[str, Measured]) -> str:
    """Return how many greedy texts are equal to those of plain decoding."""
    if not measured:
        return ""
    drafted = [
        row
        for name, of_method in measured.items()
        if name != PLAIN
        for row in enumerate(of_method.texts)
    ]
    same = [tokens == measured[PLAIN].texts[row] for row, tokens in drafted]
    return (
        f" Of the {len(same)} greedy texts with drafters, {sum(same)} are equal to plain"
        " decoding's, token for token."
    )


def _what_next() -> str:
    """Return commands to try next, as they must be typed here if no environment is active."""
    command = f"{min(os.path.relpath(sys.executable), sys.executable, key=len)} -m specjax"
    generate = (
        f"{command} generate --target Qwen/Qwen3-1.7B --drafter Qwen/Qwen3-0.6B --chat --prompt"
        " 'Hello'"
    )
    train = (
        f"{command} train --config configs/eagle3_qwen3_8b.yaml --dry-run    #"
        " docs/guides/train-eagle3.md"
    )
    site = "docs/index.md, or the whole site: make docs"
    return f"\nyour own model:   {generate}\nits own drafter:  {train}\ndocumentation:    {site}"
