"""The demo: real text from the embedded pair, with every accepted draft token in colour, and how fast each method is."""

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
"""Pieces of Python files. They end inside a line, where the tokenizer would not have joined what follows."""

INFLATED = {"hidden_size": 640, "intermediate_size": 1920, "num_layers": 12}
"""The target's size in the demo: at its own size a step would be mostly overhead."""


@dataclass(frozen=True)
class DemoConfig:
    """Show the embedded pair at work, the target inflated to a realistic cost: in about a minute.

    Attributes:
        all: measure more methods, each with tokens drawn and greedily, which takes several minutes.
        max_new_tokens: for each prompt; by default 40, or with all 96.
        temperature: of the text that is shown and of the table; 0 is greedy. By default 0, or with all 0.7.
        seed: of the random draws.
        repeats: timed runs of each method, of which the median is shown; by default 2, or with all 3.
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
"""What stands above the figures of greedy decoding."""

FEW = (SHOWN, PLAIN, "draft model", "MTP", "prompt lookup")
"""The methods that are measured without ``all``."""


def methods(target: Target, small: Target) -> dict[str, Drafter | None]:
    """The methods of the table, by name, for ``target``, which was inflated from ``small``."""
    draft = Target.from_pretrained(embedded("draft"))
    eagle3 = Eagle3.from_pretrained(embedded("eagle3"))
    return {
        PLAIN: None,
        "draft model": DraftModel(draft, draft=Chain(4)),
        "draft model, adaptive": DraftModel(draft, draft=Chain(12, stop_below=0.4)),
        "draft model, tree": DraftModel(draft, draft=SampledTree((2, 2, 1))),
        "EAGLE-3": OnInflated.of(replace(eagle3, draft=Chain(4)), small),
        "EAGLE-3, tree": OnInflated.of(replace(eagle3, draft=DynamicTree(top_k=2, depth=4, nodes=8)), small),
        "MTP": OnInflated.of(MTP.from_pretrained(embedded("mtp"), draft=Chain(5)), small),
        "prompt lookup": PromptLookup(draft=Chain(3)),
        "early exit": EarlyExit(layers=target.config.num_layers // 3, draft=Chain(2)),
    }


def run_demo(config: DemoConfig) -> None:
    """``specjax demo``."""
    usual = _USUAL_OF_ALL if config.all else _USUAL
    config = replace(config, **{name: value for name, value in usual.items() if getattr(config, name) is None})
    repeats = config.repeats or 0
    if not 1 <= repeats <= 1000:
        raise InputError(f"repeats={repeats}: must be at least 1 and at most 1000")
    ways = _ways(config)  # refuses what is out of range before any weights are read
    console = Console(highlight=False)
    with waiting("loading the models"):
        stage = _Stage.load(console)
    chosen = {name: each for name, each in stage.drafters.items() if config.all or name in FEW}
    comparisons = [MethodComparison(way, stage.target, *text.pad(stage.prompts), options) for way, options in ways.items()]
    with waiting(f"compiling {SHOWN}"):  # alone: it is wanted first
        comparisons[0].compile(chosen[SHOWN])
    with compiling(comparisons, chosen) as wait_for_all:
        console.rule(f"{SHOWN}: [bold green]accepted draft tokens[/], and the target's own")
        for row in range(2):
            stage.show(comparisons[0], chosen[SHOWN], row)
        wait_for_all()
    measured = {comparison.way: comparison.measure(chosen, repeats) for comparison in comparisons}
    console.rule("how fast each method is")
    console.print(_table(measured))
    console.print(_explanation(config, stage, measured))
    console.print(_what_next(), soft_wrap=True)


def _ways(config: DemoConfig) -> dict[str, GenerationOptions]:
    """The options of every way to draw tokens that is shown, by its name; the first one is that of the coloured text."""
    ways = {}
    for each in dict.fromkeys([config.temperature, 0.0] if config.all else [config.temperature]):
        options = pipeline.settings(max_new_tokens=config.max_new_tokens, temperature=each, seed=config.seed)
        options.sampling.rows(1)
        ways[f"T={each:g}" if each else GREEDY] = options
    return ways


@dataclass(frozen=True)
class _Stage:
    """What is shown, and where.

    Attributes:
        console: it is printed to.
        small: the target as it was trained.
        target: the target, inflated.
        drafters: of all methods, by their names.
        tokenizer: of all of them.
        prompts: the token ids of each.
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
        """One of the prompts dim, then its output as it comes, the accepted draft tokens in green."""
        prompt = self.prompts[row]
        shown, accepted, stream = len(prompt), 0, text.TextStream(self.tokenizer, prompt)
        self._write(self.tokenizer.decode(prompt, skip_special_tokens=True), "dim")
        for result in comparison.stream(drafter, row):
            new, length = result.tokens[0], int(result.lengths[0])
            drafts = int(result.stats.accepted[0]) - accepted
            accepted += drafts
            for index in range(shown, length):
                self._write(stream.push(new[index : index + 1]), "bold green" if index < shown + drafts else "")
            shown = length
        self._write(stream.push([], last=True) + "\n\n", "")

    def _write(self, piece: str, style: str) -> None:
        self.console.print(piece, style=style, end="", markup=False, emoji=False, soft_wrap=True)
        self.console.file.flush()


def _table(measured: dict[str, dict[str, Measured]]) -> Table:
    """A row a method, and for each way to draw tokens its speed, its speed-up over plain decoding and its acceptance length."""
    table = Table("\nmethod", *(f"{way}\n{what}" for way in measured for what in ("tok/s", "gain", "length")))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    methods = list(next(iter(measured.values())))
    for name in methods:
        cells = []
        for of_way in measured.values():
            speed = of_way[name].speed
            cells += [f"{speed:,.0f}", f"{speed / of_way[PLAIN].speed:.2f}x", f"{of_way[name].length:.2f}"]
        table.add_row(name, *cells)
    return table


def _explanation(config: DemoConfig, stage: _Stage, measured: dict[str, dict[str, Measured]]) -> str:
    """What the columns mean, and what was measured."""
    small, large = (count(model.params) / 1e6 for model in (stage.small, stage.target))
    return (
        f"{len(stage.prompts)} prompts one after another, {config.max_new_tokens} tokens each at most; median of "
        f"{config.repeats} interleaved runs on {jax.devices()[0].device_kind}. Tok/s is tokens a second, gain is over plain "
        "decoding, and length is acceptance length: tokens emitted a target forward. The target of "
        f"{small:.1f}M parameters is padded with zeros to {large:.0f}M, the cost of a real one: the text and every acceptance "
        f"length stay the same.{_sameness(measured.get(GREEDY, {}))}"
    )


def _sameness(measured: Mapping[str, Measured]) -> str:
    """How many of the greedy texts are plain decoding's."""
    if not measured:
        return ""
    drafted = [each for name, of_method in measured.items() if name != PLAIN for each in enumerate(of_method.texts)]
    same = [words == measured[PLAIN].texts[row] for row, words in drafted]
    return f" Of the {len(same)} texts that were drafted greedily, {sum(same)} are plain decoding's own, token for token."


def _what_next() -> str:
    """What to type next: as it must be typed here, where the environment may not be active."""
    command = f"{min(os.path.relpath(sys.executable), sys.executable, key=len)} -m specjax"
    generate = f"{command} generate --target Qwen/Qwen3-1.7B --drafter Qwen/Qwen3-0.6B --chat --prompt 'Hello'"
    train = f"{command} train --config configs/eagle3_qwen3_8b.yaml --dry-run    # docs/guides/train-eagle3.md"
    site = "docs/index.md, or the whole site: make docs"
    return f"\nyour own model:   {generate}\nits own drafter:  {train}\ndocumentation:    {site}"
