"""The demo: real text from the embedded pair, with every accepted draft token in colour, and what it bought."""

import time
from dataclasses import dataclass, replace

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax import decoding, pipeline, text
from specjax.assets import embedded
from specjax.decoding.options import GenerationOptions
from specjax.demo import OnInflated, inflate
from specjax.drafters import MTP, Drafter, DraftModel, Eagle3, EarlyExit, PromptLookup
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree
from specjax.errors import InputError
from specjax.evaluation import metrics
from specjax.models.params import count
from specjax.models.transformer import Target
from specjax.sampling import Sampling

PROMPTS = (
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):\n        self._items = []\n\n'
    "    def push(self, item):",
    'def read_config(path, encoding="utf-8"):\n    """Read the configuration file and return a dictionary."""\n    with',
    "import os\nimport sys\n\n\nclass Error(Exception):\n    pass\n\n\ndef main(args=None):\n    try",
    'def walk(self, node):\n    """Visit every child of the node."""\n    for',
)
"""Pieces of Python files. They end inside a line, where the tokenizer would not have joined what follows."""

INFLATED = {"hidden_size": 640, "intermediate_size": 1920, "num_layers": 12}
"""The target's size in the demo: at its own size a step would be mostly overhead."""


@dataclass(frozen=True)
class DemoConfig:
    """Show the embedded pair at work, the target inflated to a realistic cost.

    Attributes:
        max_new_tokens: for each prompt.
        temperature: of the text that is shown, and of a table; greedy decoding is measured, too.
        seed: of the random draws.
        repeats: timed runs of each method; the median is shown.
    """

    max_new_tokens: int = 96
    temperature: float = 0.7
    seed: int = 0
    repeats: int = 3


PLAIN, SHOWN = "plain", "EAGLE-3"
"""The baseline, and the method whose text is shown in colour."""


def methods(target: Target, small: Target) -> dict[str, Drafter | None]:
    """The methods of the table, by name, for ``target``, which was inflated from ``small``."""
    draft = Target.from_pretrained(embedded("draft"))
    eagle3 = Eagle3.from_pretrained(embedded("eagle3"))
    return {
        PLAIN: None,
        "EAGLE-3": OnInflated.of(replace(eagle3, draft=Chain(4)), small),
        "EAGLE-3, tree": OnInflated.of(replace(eagle3, draft=DynamicTree(top_k=2, depth=4, nodes=8)), small),
        "MTP": OnInflated.of(MTP.from_pretrained(embedded("mtp"), draft=Chain(5)), small),
        "draft model": DraftModel(draft, draft=Chain(4)),
        "draft model, adaptive": DraftModel(draft, draft=Chain(12, stop_below=0.4)),
        "draft model, tree": DraftModel(draft, draft=SampledTree((2, 2, 1))),
        "prompt lookup": PromptLookup(draft=Chain(6)),
        "early exit": EarlyExit(layers=target.config.num_layers // 3, draft=Chain(2)),
    }


def run_demo(config: DemoConfig) -> None:
    """``specjax demo``."""
    if not 1 <= config.repeats <= 1000:
        raise InputError(f"repeats={config.repeats}: must be at least 1 and at most 1000")
    options = pipeline.settings(max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed)
    options.sampling.rows(1)  # refuses what is out of range before any weights are read
    console = Console(highlight=False)
    directory = embedded("target")
    small = Target.from_pretrained(directory)
    target = inflate(small, **INFLATED)
    tokenizer = text.load_tokenizer(directory)
    drafters = methods(target, small)
    ids = [text.encode(tokenizer, prompt) for prompt in PROMPTS]

    console.rule(f"{SHOWN}: [bold green]accepted draft tokens[/], and the target's own")
    for row in range(2):
        console.print(_coloured(tokenizer, target, drafters[SHOWN], ids, row, options))
        console.print()
    console.rule("what it bought")
    ways = {f"T={config.temperature:g}": options}
    if config.temperature:
        ways["greedy"] = replace(options, sampling=Sampling(temperature=0.0))
    console.print(_table({way: _measure(target, drafters, ids, options, config.repeats) for way, options in ways.items()}))
    console.print(
        f"{len(PROMPTS)} prompts one after another, {config.max_new_tokens} tokens each at most; median of {config.repeats} "
        f"interleaved runs on {jax.devices()[0].device_kind}. Tok/s is tokens a second, gain is over plain decoding, "
        "and length is acceptance length: tokens emitted a target forward. "
        f"The target of {count(small.params) / 1e6:.1f}M parameters is padded with zeros to {count(target.params) / 1e6:.0f}M, "
        "the cost of a real one: the text and every acceptance length stay the same."
    )


def _coloured(
    tokenizer, target: Target, drafter: Drafter | None, ids: list[list[int]], row: int, options: GenerationOptions
) -> Text:
    """One of the prompts dim, then the output with its accepted draft tokens in green."""
    prompt, (tokens, lengths) = ids[row], text.pad(ids)  # one width for all prompts: one compilation
    shown, accepted = len(prompt), 0
    stream = text.TextStream(tokenizer, prompt)
    line = Text(tokenizer.decode(prompt, skip_special_tokens=True), style="dim")
    for result in decoding.stream(target, drafter, tokens[row : row + 1], lengths[row : row + 1], **vars(options), steps=1):
        new, length = result.tokens[0], int(result.lengths[0])
        drafts = int(result.stats.accepted[0]) - accepted
        accepted += drafts
        for index in range(shown, length):
            style = "bold green" if index < shown + drafts else "white"
            line.append(stream.push(new[index : index + 1]), style=style)
        shown = length
    line.append(stream.push([], last=True))
    return line


@dataclass(frozen=True)
class _Measured:
    """Of one method: tokens a second, the median of its runs; and tokens emitted a target forward."""

    speed: float
    length: float


def _measure(
    target: Target, drafters: dict[str, Drafter | None], ids: list[list[int]], options: GenerationOptions, repeats: int
) -> dict[str, _Measured]:
    """Every method on all prompts, their runs interleaved."""
    tokens, lengths = text.pad(ids)

    def run(drafter: Drafter | None, row: int) -> decoding.Result:  # one width for all prompts: one compilation
        return decoding.generate(target, drafter, tokens[row : row + 1], lengths[row : row + 1], **vars(options))

    for drafter in drafters.values():
        jax.block_until_ready(run(drafter, 0))  # compiles
    speeds: dict[str, list[float]] = {name: [] for name in drafters}
    summaries = {}
    for _ in range(repeats):
        for name, drafter in drafters.items():
            started = time.perf_counter()
            results = jax.block_until_ready([run(drafter, row) for row in range(len(ids))])
            seconds = time.perf_counter() - started
            stats = jax.tree.map(lambda *rows: np.concatenate(rows), *(result.stats for result in results))
            summaries[name] = metrics.summarise(stats)
            speeds[name].append(summaries[name].emitted / seconds)
    return {name: _Measured(float(np.median(speeds[name])), summary.acceptance_length) for name, summary in summaries.items()}


def _table(measured: dict[str, dict[str, _Measured]]) -> Table:
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
