"""The settings with which other projects measure acceptance, so that figures can be compared.

The settings were read in the sources that each protocol names. What could not be verified there, or
cannot be the same here, is stated in docs/guides/evaluate.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specjax.errors import InputError
from specjax.evaluation.lengths import Mean, Measure, StepCounts
from specjax.evaluation.questions import SPEC_BENCH, Question

ProtocolName = Literal["speed-bench", "spec-bench", "vllm-80"]

MT_BENCH = "mt-bench"
"""The task of the questions of MT-bench, in Spec-Bench's file as well."""


@dataclass(frozen=True)
class AcceptanceProtocol:
    """The settings of a measurement of acceptance.

    Attributes:
        name: its name.
        max_new_tokens: the maximum number of tokens of an answer.
        temperature: the sampling temperature; 0 is greedy.
        turns: the number of turns of a question that are answered; None: all.
        questions: the number of questions of the whole set.
        measure: how an acceptance length is computed.
        mean: how the lengths of several answers become one.
        source: the file that states the settings.
        draft: the shape of the drafts, as its text; empty: any.
        may_think: whether the model may be told to think, or not to.
        only: the task whose questions are answered; empty: all.
        tasks: the task of a category, which replaces it in tables.

    Examples:
        >>> from specjax.evaluation.protocols import PROTOCOLS
        >>> from specjax.evaluation.questions import Question
        >>> protocol = PROTOCOLS["vllm-80"]
        >>> protocol.max_new_tokens, protocol.measure, protocol.mean
        (256, 'drafts', 'pooled')
        >>> questions = [Question("mt-bench", ("Why?", "And how?")), Question("rag", ("Who?",))]
        >>> protocol.select(questions)
        [Question(category='mt-bench', turns=('Why?',))]
    """

    name: ProtocolName
    max_new_tokens: int
    temperature: float
    turns: int | None
    questions: int
    measure: Measure
    mean: Mean
    source: str
    draft: str = ""
    may_think: bool = False
    only: str = ""
    tasks: Mapping[str, str] = field(default_factory=lambda: SPEC_BENCH)

    def select(self, questions: Sequence[Question]) -> list[Question]:
        """Return the questions of the protocol, with the turns that are answered.

        Raises:
            InputError: there are none.
        """
        selected = [
            Question(question.category, question.turns[: self.turns])
            for question in questions
            if not self.only or question.category == self.only
        ]
        if not selected:
            raise InputError(
                f"protocol={self.name!r}: the file of --questions has no question of"
                f" {self.only}; give MT-bench's questions, or Spec-Bench's file, which has them"
            )
        return selected

    def measure_for(self, counts: StepCounts) -> Measure:
        """Return the protocol's measure, or the other one if only that one was counted."""
        if counts.has(self.measure):
            return self.measure
        return "passes" if self.measure == "drafts" else "drafts"


PROTOCOLS: dict[ProtocolName, AcceptanceProtocol] = {
    protocol.name: protocol
    for protocol in (
        AcceptanceProtocol(
            name="speed-bench",
            max_new_tokens=4096,
            temperature=0.0,
            turns=None,
            questions=880,
            measure="passes",
            mean="of_conversations",
            source="examples/specdec_bench of github.com/NVIDIA/Model-Optimizer",
            may_think=True,
            tasks={},
        ),
        AcceptanceProtocol(
            name="spec-bench",
            max_new_tokens=1024,
            temperature=0.0,
            turns=None,
            questions=480,
            measure="passes",
            mean="pooled",
            source="evaluation/eval.py and speed.py of github.com/hemingkx/Spec-Bench",
        ),
        AcceptanceProtocol(
            name="vllm-80",
            max_new_tokens=256,
            temperature=0.0,
            turns=1,
            questions=80,
            measure="drafts",
            mean="pooled",
            source="tests/v1/spec_decode/test_acceptance_length.py of github.com/vllm-project/vllm",
            draft="chain of 3",
            only=MT_BENCH,
        ),
    )
}
"""The protocols by name."""

_FORMULAS: dict[Measure, str] = {
    "passes": "emitted tokens / passes of the target",
    "drafts": "1 + accepted tokens / passes with a draft",
}
_MEANS: dict[Mean, str] = {
    "pooled": "all steps together",
    "of_requests": "the mean of the answers",
    "of_conversations": "the mean of the conversations",
}


def formula(measure: Measure, mean: Mean) -> str:
    """Return a text that says how an acceptance length is computed.

    Examples:
        >>> from specjax.evaluation.protocols import formula
        >>> formula("drafts", "pooled")
        '1 + accepted tokens / passes with a draft, all steps together, bonus token included'
    """
    return f"{_FORMULAS[measure]}, {_MEANS[mean]}, bonus token included"


def differences(
    protocol: AcceptanceProtocol,
    *,
    questions: int,
    max_new_tokens: int,
    sampling: Mapping[str, float],
    has_template: bool,
    measure: Measure,
    thinking: str | None = None,
    drafts: Mapping[str, str] = {},
) -> list[str]:
    """Return in which settings a run differs from a protocol, one text for each.

    Args:
        protocol: the protocol.
        questions: the number of questions that are answered.
        max_new_tokens: the maximum number of tokens of an answer.
        sampling: the temperature and the settings that change its distribution, by name; those
            beside the temperature are the ones that are in use.
        has_template: whether a chat template is applied.
        measure: how the acceptance lengths are computed.
        thinking: "on" or "off" if the model was told so.
        drafts: the shape of each drafter's drafts, as its text, by the drafter's name.

    Examples:
        >>> from specjax.evaluation.protocols import PROTOCOLS, differences
        >>> differences(
        ...     PROTOCOLS["vllm-80"],
        ...     questions=10,
        ...     max_new_tokens=256,
        ...     sampling={"temperature": 0.0},
        ...     has_template=True,
        ...     measure="drafts",
        ... )
        ['10 questions instead of 80']
    """
    texts = []
    if questions != protocol.questions:
        texts.append(f"{questions} questions instead of {protocol.questions}")
    if max_new_tokens != protocol.max_new_tokens:
        texts.append(f"max_new_tokens {max_new_tokens} instead of {protocol.max_new_tokens}")
    stated = {"temperature": protocol.temperature}
    for name, value in sampling.items():
        if name not in stated:
            texts.append(f"{name} {value:g}, which the protocol does not have")
        elif value != stated[name]:
            texts.append(f"{name} {value:g} instead of {stated[name]:g}")
    if not has_template:
        texts.append("no chat template")
    if thinking is not None and not protocol.may_think:
        texts.append(f"thinking {thinking}, which the protocol does not set")
    if measure != protocol.measure:
        texts.append(
            f"length as {_FORMULAS[measure]} instead of {_FORMULAS[protocol.measure]}, which was"
            " not counted"
        )
    for name, shape in drafts.items():
        if protocol.draft and shape != protocol.draft:
            texts.append(f"{name} drafts {shape} instead of {protocol.draft}")
    return texts
