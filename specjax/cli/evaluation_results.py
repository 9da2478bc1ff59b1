"""The output of ``specjax evaluate``, of models in this process and of a server."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from specjax.evaluation.questions import Question
from specjax.files import replacing
from specjax.reports import evaluation as report


class SamplingOptions(Protocol):
    """The options of a command that decide the distribution of the tokens."""

    @property
    def temperature(self) -> float:
        """The temperature; 0 is greedy."""
        ...

    @property
    def top_k(self) -> int:
        """The number of most likely tokens; 0 is no limit."""
        ...

    @property
    def top_p(self) -> float:
        """The total probability of the most likely tokens."""
        ...

    @property
    def min_p(self) -> float:
        """The minimum probability relative to the most likely token."""
        ...


def used_sampling(options: SamplingOptions) -> dict[str, float]:
    """Return the temperature, and the limits of the distribution that are in use, by name.

    Examples:
        >>> from specjax.cli.evaluate import EvaluateConfig
        >>> from specjax.cli.evaluation_results import used_sampling
        >>> used_sampling(EvaluateConfig(temperature=0.6, top_p=0.95))
        {'temperature': 0.6, 'top_p': 0.95}
    """
    sampling: dict[str, float] = {"temperature": options.temperature}
    if options.temperature:
        unlimited = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        values = {name: getattr(options, name) for name in unlimited}
        sampling |= {name: value for name, value in values.items() if value != unlimited[name]}
    return sampling


def golden_notes(
    questions: Sequence[Question], max_new_tokens: int, sampling: Mapping[str, float]
) -> list[str]:
    """Return the first comments of a golden file: the data, the length and the sampling."""
    categories = ", ".join(sorted({question.category for question in questions}))
    limits = " ".join(f"{name} {value:g}" for name, value in sampling.items())
    return [f"dataset: {categories} | output_len: {max_new_tokens}", limits]


@dataclass(frozen=True)
class EvaluationResults:
    """The figures of an evaluation and what is written beside them.

    Attributes:
        content: the content of results.json, without the figures.
        figures: the figures by category and method.
        explanations: texts below the table.
        golden: the texts of golden files, by the name of the drafter or the model.
        has_picture: whether there is plain decoding to draw speed-ups over.
    """

    content: dict[str, Any]
    figures: report.Results
    explanations: list[str]
    golden: dict[str, str] = field(default_factory=dict)
    has_picture: bool = True

    def show(self, output: Path | None) -> None:
        """Print the results, and write them to a directory unless it is None."""
        console = Console(width=160)
        console.print(report.table(self.figures))
        for text in self.explanations:
            console.print(text, markup=False, highlight=False)
        if output is None:
            return
        files = {
            "results.json": json.dumps({**self.content, "results": self.figures}, indent=2) + "\n",
            "results.md": report.markdown(self.figures, self.explanations),
            **{_golden_file(name): text for name, text in self.golden.items()},
        }
        with replacing(output) as scratch:
            for name, text in files.items():
                (scratch / name).write_text(text)
            if self.has_picture:
                report.draw(self.figures, scratch / "results.png")
        pictures = ["results.png"] if self.has_picture else []
        console.print(f"written: {output}/{', '.join([*files, *pictures])}")


def _golden_file(name: str) -> str:
    return f"golden_al_{re.sub(r'[^A-Za-z0-9.-]+', '_', name).strip('_.')}.yaml"
