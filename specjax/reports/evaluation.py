"""The report of an evaluation: speed-up and acceptance, as a table, Markdown and a figure."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from rich.table import Table

from specjax.decoding.stats import Stats
from specjax.evaluation import metrics
from specjax.evaluation.lengths import Measure, StepCounts, mean_length
from specjax.evaluation.protocols import AcceptanceProtocol, formula
from specjax.evaluation.served import ServedAnswer, total_growth
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
        question: the index of the question.
        category: the category of the question.
        method: the name of the method.
        seconds: the seconds of each repeat.
        stats: the statistics of one row, which are the same in every repeat.
    """

    question: int
    category: str
    method: str
    seconds: tuple[float, ...]
    stats: Stats

    @property
    def steps(self) -> StepCounts:
        """The counts from which acceptance lengths are computed."""
        acceptance = metrics.summarise(self.stats)
        drafts = max(acceptance.drafted_at, default=0)
        return StepCounts(acceptance.emitted, acceptance.steps, drafts, acceptance.accepted)


def summarise(
    answers: Sequence[MethodAnswer],
    methods: Sequence[str],
    protocol: AcceptanceProtocol | None = None,
) -> Results:
    """Summarize answers by category, and all together.

    The figures of each method are:

    - ``tokens_per_second``: emitted tokens per second, the median of the repeats;
    - ``speedup``: the speed-up over plain decoding, and ``spread``, the smallest and the largest
      one of the repeats;
    - ``acceptance_length_pooled``: all emitted tokens divided by all target passes;
    - ``acceptance_length_of_requests``: the mean of the answers' acceptance lengths, in which short
      and long answers have the same weight;
    - ``acceptance_length_of_conversations``: the mean of the questions' acceptance lengths, each
      of all turns together;
    - ``acceptance_length_of_drafts``: 1 plus all accepted tokens divided by all passes with a
      draft, as in vLLM;
    - ``acceptance_length_by_protocol``, with a protocol: the figure that it reports;
    - ``acceptance_by_position``: for each depth, the share of the steps with a draft of that depth
      that emitted a token of it;
    - ``answers``: the number of answers.
    """
    return {name: _summary(part, methods, protocol) for name, part in _by_category(answers).items()}


def summarise_served(
    answers: Sequence[ServedAnswer], model: str, protocol: AcceptanceProtocol | None = None
) -> Results:
    """Summarize a server's answers by category, and all together, as `summarise` does.

    There is one method, the model. The speed is that of requests that are sent one at a time. Where
    the server does not count what a figure needs, the figure is None.
    """
    results: Results = {}
    for name, part in _by_category(answers).items():
        growth = total_growth(part)
        steps = [(answer.question, answer.growth.steps) for answer in part]
        tokens, seconds = sum(a.tokens for a in part), sum(a.seconds for a in part)
        results[name] = {
            model: {
                "tokens_per_second": tokens / seconds,
                **_lengths(steps, protocol),
                "acceptance_by_position": growth.by_position(),
                "answers": len(part),
            }
        }
    return results


def sum_counts(counts: Sequence[StepCounts]) -> StepCounts:
    """Return the counts of several answers together."""
    total = counts[0]
    for more in counts[1:]:
        total += more
    return total


_Answer = TypeVar("_Answer", MethodAnswer, ServedAnswer)


def _by_category(answers: Sequence[_Answer]) -> dict[str, list[_Answer]]:
    """Return the answers of each category in order, and all."""
    categories = dict.fromkeys(answer.category for answer in answers)
    parts = {name: [answer for answer in answers if answer.category == name] for name in categories}
    return {**parts, OVERALL: list(answers)}


def _lengths(
    steps: Sequence[tuple[int, StepCounts]], protocol: AcceptanceProtocol | None
) -> dict[str, float | None]:
    """Return the acceptance lengths of answers, with the index of the question of each."""
    total = sum_counts([counts for _, counts in steps])
    measure: Measure = "passes" if total.has("passes") else "drafts"
    lengths = {
        "acceptance_length_pooled": mean_length(steps, measure, "pooled"),
        "acceptance_length_of_requests": mean_length(steps, measure, "of_requests"),
        "acceptance_length_of_conversations": mean_length(steps, measure, "of_conversations"),
        "acceptance_length_of_drafts": mean_length(steps, "drafts", "pooled"),
    }
    if protocol is not None:
        lengths["acceptance_length_by_protocol"] = mean_length(
            steps, protocol.measure_for(total), protocol.mean
        )
    return lengths


def _summary(
    answers: Sequence[MethodAnswer], methods: Sequence[str], protocol: AcceptanceProtocol | None
) -> dict[str, dict[str, Any]]:
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
            **_lengths([(answer.question, answer.steps) for answer in part], protocol),
            "acceptance_by_position": list(total.by_position),
            "answers": len(part),
        }
    return summary


def _speeds(answers: Sequence[MethodAnswer]) -> np.ndarray:
    """Return the emitted tokens per second of each repeat, ``[repeats]``."""
    emitted = sum(metrics.summarise(answer.stats).emitted for answer in answers)
    return emitted / np.sum([answer.seconds for answer in answers], axis=0)


def _number(name: str, form: str = "{:.2f}") -> Callable[[dict[str, Any]], str]:
    return lambda values: "-" if values[name] is None else form.format(values[name])


def _spread(values: dict[str, Any]) -> str:
    low, high = values["spread"]
    return f"{low:.2f}-{high:.2f}"


def _positions(values: dict[str, Any]) -> str:
    shares = values["acceptance_by_position"]
    return " ".join("-" if share is None else f"{share:.2f}" for share in shares)


def _columns(results: Results) -> dict[str, Callable[[dict[str, Any]], str]]:
    """Return the text of a method's figures in each column, by the column's heading."""
    first = next(iter(results[OVERALL].values()))
    columns = {"tokens/s": _number("tokens_per_second", "{:,.1f}")}
    if "speedup" in first:
        columns |= {"speed-up": _number("speedup", "{:.2f}x"), "spread": _spread}
    columns |= {
        "length, pooled": _number("acceptance_length_pooled"),
        "length, of requests": _number("acceptance_length_of_requests"),
    }
    if "acceptance_length_by_protocol" in first:
        columns["length, by protocol"] = _number("acceptance_length_by_protocol")
    return columns | {"by position": _positions}


def _headings(results: Results) -> list[str]:
    return ["questions", "method", *_columns(results)]


def _rows(results: Results) -> list[tuple[str, ...]]:
    # A single category equals the total.
    shown = results if len(results) > 2 else {OVERALL: results[OVERALL]}
    columns = _columns(results).values()
    return [
        (category if i == 0 else "", method, *(column(values) for column in columns))
        for category, methods in shown.items()
        for i, (method, values) in enumerate(methods.items())
    ]


def table(results: Results) -> Table:
    """Return the results as a table for the terminal."""
    rich_table = Table(*_headings(results))
    for column in rich_table.columns[2:-1]:
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


def explanation_of_served(questions: int, address: str) -> str:
    """Return a text that explains how the figures of a server were measured."""
    return (
        f"{questions} questions, one request at a time, to {address}; lengths from the growth of"
        " its counters: pooled, all together; of requests, the mean over the answers."
    )


def explanation_of_protocol(
    protocol: AcceptanceProtocol, measure: Measure, texts: Sequence[str]
) -> str:
    """Return a text that says how the protocol's figure is computed, and where a run differs."""
    lines = [
        f"Length by protocol {protocol.name} ({protocol.source}):"
        f" {formula(measure, protocol.mean)}."
    ]
    lines += [f"Differs from the protocol: {text}." for text in texts]
    return "\n".join(lines)


def markdown(results: Results, explanations: Sequence[str]) -> str:
    """Return the results as a Markdown table, with the explanations below."""
    headings = _headings(results)
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(results)]
    for text in explanations:
        lines += ["", *text.splitlines()]
    return "\n".join([*lines, ""])


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
