"""The report of an evaluation: speed-up and acceptance, as a table, Markdown and a figure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from rich.table import Table

from specjax.decoding.stats import Stats
from specjax.evaluation import metrics
from specjax.reports import pictures, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAIN = "plain"
"""The name of decoding without a drafter, the baseline of every speed-up."""

OVERALL = "overall"

Results = dict[str, dict[str, dict[str, Any]]]
"""The figures of `summarise` for each method, by category and for `OVERALL`."""


@dataclass(frozen=True)
class MethodAnswer:
    """One method's answer to one turn.

    Attributes:
        category: the category of the question.
        method: the name of the method.
        seconds: the seconds of each repeat.
        stats: the statistics of one row, which are the same in every repeat.
    """

    category: str
    method: str
    seconds: tuple[float, ...]
    stats: Stats


def summarise(answers: Sequence[MethodAnswer], methods: Sequence[str]) -> Results:
    """Summarize answers by category, and all together.

    The figures of each method are:

    - ``tokens_per_second``: emitted tokens per second, the median of the repeats;
    - ``speedup``: the speed-up over plain decoding, and ``spread``, the smallest and the largest
      one of the repeats;
    - ``acceptance_length_pooled``: all emitted tokens divided by all target passes;
    - ``acceptance_length_of_requests``: the mean of the answers' acceptance lengths, in which short
      and long answers have the same weight;
    - ``acceptance_by_position``: for each depth, the share of the steps with a draft of that depth
      that emitted a token of it;
    - ``answers``: the number of answers.
    """
    categories = list(dict.fromkeys(answer.category for answer in answers))
    by_category = {
        category: [answer for answer in answers if answer.category == category]
        for category in categories
    }
    return {
        name: _summary(part, methods)
        for name, part in {**by_category, OVERALL: list(answers)}.items()
    }


def _summary(answers: Sequence[MethodAnswer], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    by_method = {
        method: [answer for answer in answers if answer.method == method] for method in methods
    }
    speeds = {method: _speeds(part) for method, part in by_method.items()}
    summary = {}
    for method, part in by_method.items():
        stats = jax.tree.map(lambda *rows: np.concatenate(rows), *(answer.stats for answer in part))
        total = metrics.summarise(stats)
        ratios = speeds[method] / speeds[PLAIN]
        summary[method] = {
            "tokens_per_second": float(np.median(speeds[method])),
            "speedup": float(np.median(speeds[method]) / np.median(speeds[PLAIN])),
            "spread": [float(ratios.min()), float(ratios.max())],
            "acceptance_length_pooled": total.acceptance_length,
            "acceptance_length_of_requests": float(
                np.mean([metrics.summarise(a.stats).acceptance_length for a in part])
            ),
            "acceptance_by_position": list(total.by_position),
            "answers": len(part),
        }
    return summary


def _speeds(answers: Sequence[MethodAnswer]) -> np.ndarray:
    """Return the emitted tokens per second of each repeat, ``[repeats]``."""
    emitted = sum(metrics.summarise(answer.stats).emitted for answer in answers)
    return emitted / np.sum([answer.seconds for answer in answers], axis=0)


_HEADINGS = (
    "questions",
    "method",
    "tokens/s",
    "speed-up",
    "spread",
    "length, pooled",
    "length, of requests",
    "by position",
)


def _rows(results: Results) -> list[tuple[str, ...]]:
    rows = []
    # A single category equals the total.
    shown = results if len(results) > 2 else {OVERALL: results[OVERALL]}
    for category, methods in shown.items():
        for i, (method, values) in enumerate(methods.items()):
            by_position = " ".join(
                "-" if share is None else f"{share:.2f}"
                for share in values["acceptance_by_position"]
            )
            low, high = values["spread"]
            rows.append(
                (
                    category if i == 0 else "",
                    method,
                    f"{values['tokens_per_second']:,.1f}",
                    f"{values['speedup']:.2f}x",
                    f"{low:.2f}-{high:.2f}",
                    f"{values['acceptance_length_pooled']:.2f}",
                    f"{values['acceptance_length_of_requests']:.2f}",
                    by_position,
                )
            )
    return rows


def table(results: Results) -> Table:
    """Return the results as a table for the terminal."""
    rich_table = Table(*_HEADINGS)
    for column in rich_table.columns[2:7]:
        column.justify = "right"
    for row in _rows(results):
        rich_table.add_row(*row, end_section=False)
    return rich_table


def explanation(repeats: int, questions: int, device: str) -> str:
    """Return a text that explains how the figures were measured."""
    return (
        f"{questions} questions, one row at a time; medians of {repeats} interleaved runs on"
        f" {device}. Speed-up is over plain decoding of the same engine. Length is the acceptance"
        " length, the tokens emitted per target pass: pooled, all tokens divided by all passes; of"
        " requests, the mean over the answers."
    )


def markdown(results: Results, repeats: int, questions: int, device: str) -> str:
    """Return the results as a Markdown table."""
    lines = ["| " + " | ".join(_HEADINGS) + " |", "|" + "---|" * len(_HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(results)]
    return "\n".join([*lines, "", explanation(repeats, questions, device), ""])


@style.styled
def draw(results: Results, path: Path) -> None:
    """Draw the speed-up of each method by category, and the acceptance by depth."""
    methods = [method for method in results[OVERALL] if method != PLAIN]
    one_bar = max(0.24, 0.62 / max(len(methods), 1))  # inches
    bars_height = 0.7 + len(results) * (one_bar * len(methods) + 0.2)
    figure, (bars, lines) = style.new_figure(bars_height + 0.24 * len(methods), 3.0)
    _draw_speedups(bars, results, methods)
    _draw_acceptance(lines, results[OVERALL], methods)
    columns = 1 if max(map(len, methods), default=0) > 24 else 2
    figure.legend(*bars.get_legend_handles_labels(), loc="outside upper left", ncols=columns)
    pictures.save(figure, "output", path)


def _draw_speedups(axes: "Axes", results: Results, methods: Sequence[str]) -> None:
    """Draw a bar for each method and category, with a line from the slowest to the fastest run."""
    width = 0.86 / max(len(methods), 1)
    for i, method in enumerate(methods):
        values = [results[category][method] for category in results]
        heights = np.array([value["speedup"] for value in values])
        low, high = np.array([value["spread"] for value in values]).T
        ys = np.arange(len(results)) - 0.43 + (i + 0.5) * width
        ends = {
            "xerr": np.abs(np.stack([heights - low, high - heights])),
            "ecolor": style.theme().ink,
            "error_kw": {"elinewidth": 1.0},
        }
        axes.barh(ys, heights, width * 0.9, label=method, **ends)
        for y, height, end in zip(ys, heights, np.maximum(high, heights), strict=True):
            axes.annotate(
                f"{height:.2f}x",
                (end, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9.5,
            )
    axes.axvline(1, color=style.theme().muted, linestyle="--", linewidth=1.2)
    axes.set_yticks(range(len(results)), list(results))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("speed-up over plain decoding (thin line: slowest to fastest run)")
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.margins(x=0.12, y=0.02)


def _draw_acceptance(
    axes: "Axes", overall: dict[str, dict[str, Any]], methods: Sequence[str]
) -> None:
    """Draw how often drafted tokens were emitted, by their depth in the draft."""
    deepest = max((len(overall[method]["acceptance_by_position"]) for method in methods), default=0)
    for method, marker in zip(methods, itertools.cycle(style.MARKERS), strict=False):
        shares = [
            np.nan if share is None else share
            for share in overall[method]["acceptance_by_position"]
        ]
        axes.plot(range(1, len(shares) + 1), shares, f"{marker}-")
    axes.set_title("all questions")
    axes.set_xlabel("place in the draft (tokens after the root)")
    axes.set_ylabel("share of steps that emit it")
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, deepest + 1))
