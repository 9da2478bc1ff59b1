"""The report of an evaluation: speed-up and acceptance by kind of question, as a table, Markdown and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table

from specjax.decoding.stats import Stats
from specjax.evaluation import metrics
from specjax.reports import pictures

PLAIN = "plain"
"""Decoding without a drafter, which every speed-up is over."""

OVERALL = "overall"

Results = dict[str, dict[str, dict[str, Any]]]
"""For each category, and `OVERALL`, for each method: what `summarise` counts."""


@dataclass(frozen=True)
class Answer:
    """One method's answer to one turn.

    Attributes:
        category: of the question.
        method: its name.
        seconds: of each repeat.
        stats: of one row; the same in every repeat.
    """

    category: str
    method: str
    seconds: tuple[float, ...]
    stats: Stats


def summarise(answers: Sequence[Answer], methods: Sequence[str]) -> Results:
    """For each category, and for all questions together, of each method:

    - ``tokens_per_second``: emitted tokens over seconds, the median of the repeats; ``speedup`` over plain decoding, with
      ``spread``, the smallest and the largest of the repeats;
    - ``acceptance_length_pooled``: all emitted tokens over all passes of the target;
    - ``acceptance_length_of_requests``: the mean of every answer's own, in which short answers weigh as much as long ones;
    - ``acceptance_by_position``: of the steps that drafted so deep, the share that emitted a token of that depth;
    - ``answers``.
    """
    categories = list(dict.fromkeys(answer.category for answer in answers))
    chosen = {category: [answer for answer in answers if answer.category == category] for category in categories}
    return {name: _summary(part, methods) for name, part in {**chosen, OVERALL: list(answers)}.items()}


def _summary(answers: Sequence[Answer], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    of_method = {method: [answer for answer in answers if answer.method == method] for method in methods}
    speeds = {method: _speeds(part) for method, part in of_method.items()}
    found = {}
    for method, part in of_method.items():
        stats = jax.tree.map(lambda *rows: np.concatenate(rows), *(answer.stats for answer in part))
        total = metrics.summarise(stats)
        ratios = speeds[method] / speeds[PLAIN]
        found[method] = {
            "tokens_per_second": float(np.median(speeds[method])),
            "speedup": float(np.median(speeds[method]) / np.median(speeds[PLAIN])),
            "spread": [float(ratios.min()), float(ratios.max())],
            "acceptance_length_pooled": total.acceptance_length,
            "acceptance_length_of_requests": float(np.mean([metrics.summarise(a.stats).acceptance_length for a in part])),
            "acceptance_by_position": list(total.by_position),
            "answers": len(part),
        }
    return found


def _speeds(answers: Sequence[Answer]) -> np.ndarray:
    """``[repeats]`` emitted tokens a second."""
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
    for category, methods in results.items():
        for i, (method, values) in enumerate(methods.items()):
            by_position = " ".join("-" if share is None else f"{share:.2f}" for share in values["acceptance_by_position"])
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
    """For the terminal."""
    made = Table(*_HEADINGS)
    for column in made.columns[2:7]:
        column.justify = "right"
    for row in _rows(results):
        made.add_row(*row, end_section=False)
    return made


def explanation(repeats: int, questions: int, device: str) -> str:
    """What the figures are of."""
    return (
        f"{questions} questions, one row at a time; medians of {repeats} interleaved runs on {device}. "
        "Speed-up is over plain decoding of the same engine. Length is the acceptance length, tokens emitted a pass of the "
        "target: pooled, all tokens over all passes; and the mean of every answer's own."
    )


def markdown(results: Results, repeats: int, questions: int, device: str) -> str:
    """The table in Markdown."""
    lines = ["| " + " | ".join(_HEADINGS) + " |", "|" + "---|" * len(_HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(results)]
    return "\n".join([*lines, "", explanation(repeats, questions, device), ""])


def draw(results: Results, path: Path) -> None:
    """Speed-up of every method by kind of question, and how acceptance falls with depth."""
    methods = [method for method in results[OVERALL] if method != PLAIN]
    figure, (bars, lines) = pictures.new_figure(4 + 1.6 * len(results) + 4, 4.2, panels=2)
    width = 0.8 / max(len(methods), 1)
    for i, method in enumerate(methods):
        values = [results[category][method] for category in results]
        places = np.arange(len(results)) - 0.4 + (i + 0.5) * width
        heights = [value["speedup"] for value in values]
        reach = np.array([[abs(h - edge) for h, edge in zip(heights, edges, strict=True)]
                          for edges in zip(*(value["spread"] for value in values), strict=True)])  # fmt: skip
        bars.bar(places, heights, width * 0.95, yerr=reach, capsize=2, label=method)
        shares = results[OVERALL][method]["acceptance_by_position"]
        lines.plot(range(1, len(shares) + 1), [np.nan if share is None else share for share in shares], "o-", label=method)
    bars.axhline(1.0, color="black", linewidth=0.8)
    bars.set_xticks(range(len(results)), list(results), rotation=20, ha="right")
    bars.set_ylabel("speed-up over plain decoding")
    bars.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    lines.set_xlabel("drafted token")
    lines.set_ylabel("share of steps that emit it")
    lines.set_ylim(0, 1)
    deepest = max((len(results[OVERALL][method]["acceptance_by_position"]) for method in methods), default=0)
    lines.set_xticks(range(1, deepest + 1))
    lines.set_title("all questions", fontsize="medium")
    pictures.save(figure, "output", path)
