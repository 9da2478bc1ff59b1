"""Acceptance lengths, as different projects compute them from the steps of some answers.

All of them count the bonus token: a step that accepts no drafted token has length 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Measure = Literal["passes", "drafts"]
"""How a length is computed from the counts of steps.

- ``passes``: emitted tokens divided by all passes of the target after the prompt;
- ``drafts``: 1 plus accepted tokens divided by the passes that had a draft, as in vLLM.
"""

Mean = Literal["pooled", "of_requests", "of_conversations"]
"""How the lengths of several answers become one.

- ``pooled``: one length of all their steps together;
- ``of_requests``: the mean of the answers' lengths;
- ``of_conversations``: the mean of the questions' lengths. That of a question is of the steps of
  all its turns together.
"""


@dataclass(frozen=True)
class StepCounts:
    """The counts of the steps of one answer, or of several answers together.

    Attributes:
        emitted: the number of emitted tokens.
        passes: the number of passes of the target after the prompt; None: it was not counted.
        drafts: the number of these passes that had a draft; None: it was not counted.
        accepted: the number of accepted drafted tokens; None: it was not counted.

    Examples:
        >>> from specjax.evaluation.lengths import StepCounts
        >>> counts = StepCounts(emitted=10, passes=5, drafts=4, accepted=5)
        >>> counts.length("passes"), counts.length("drafts")  # one pass had no draft
        (2.0, 2.25)
    """

    emitted: int
    passes: int | None
    drafts: int | None
    accepted: int | None

    def __add__(self, more: "StepCounts") -> "StepCounts":
        return StepCounts(
            self.emitted + more.emitted,
            _sum(self.passes, more.passes),
            _sum(self.drafts, more.drafts),
            _sum(self.accepted, more.accepted),
        )

    def has(self, measure: Measure) -> bool:
        """Return whether the counts that the measure needs are there."""
        if measure == "passes":
            return self.passes is not None
        return self.drafts is not None and self.accepted is not None

    def length(self, measure: Measure) -> float | None:
        """Return the acceptance length; None if there was no pass of the target."""
        if measure == "passes":
            return self.emitted / self.passes if self.passes else None
        if self.drafts is None or self.accepted is None or not self.emitted:
            return None
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


def mean_length(
    answers: Sequence[tuple[int, StepCounts]], measure: Measure, mean: Mean
) -> float | None:
    """Return the mean acceptance length of answers; None if no answer has a pass.

    Args:
        answers: for each answer, the index of its question and the counts of its steps.
        measure: how a length is computed.
        mean: how the lengths become one.

    Examples:
        >>> from specjax.evaluation.lengths import StepCounts, mean_length
        >>> answers = [(0, StepCounts(8, 4, 4, 4)), (0, StepCounts(8, 8, 8, 0))]
        >>> answers += [(1, StepCounts(3, 1, 1, 2))]
        >>> round(mean_length(answers, "passes", "pooled"), 3)  # 19 tokens, 13 passes
        1.462
        >>> mean_length(answers, "passes", "of_requests")  # 2, 1 and 3
        2.0
        >>> round(mean_length(answers, "passes", "of_conversations"), 3)  # 16 / 12 and 3
        2.167
    """
    groups: dict[int, StepCounts] = {}
    for index, (question, counts) in enumerate(answers):
        group = {"pooled": 0, "of_requests": index, "of_conversations": question}[mean]
        groups[group] = groups[group] + counts if group in groups else counts
    lengths = [counts.length(measure) for counts in groups.values()]
    defined = [length for length in lengths if length is not None]
    return float(np.mean(defined)) if defined else None
