"""The results that the conversations of real programs must have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Expected:
    """The results of a conversation.

    Attributes:
        names: the names of the notes that the tool reads.
        answers: a part of each answer.
    """

    names: tuple[str, ...]
    answers: tuple[str, ...]


NOTES = _Expected(
    ("alpha", "beta"), ("The ferry leaves at nine.", "The shop is closed.", "Goodbye for now.")
)
WITHOUT_TOOLS = {
    "instructor": _Expected((), ("Ada, 36", "Bob, 7")),
    "lm_eval": _Expected((), ("Good morning", "Good evening", "Good night")),
}


def fault_of(
    program: str, title: str, conversation: Mapping[str, Any], is_model: bool = False
) -> str:
    """Return what is wrong with a conversation; empty: nothing is.

    The tool must have run as it was asked to, and the answers must be those of the rules.

    Args:
        program: the name of the program.
        title: the title of the conversation.
        conversation: the runs of the tool, and the answers.
        is_model: whether a model has answered, which may write any answer.
    """
    expected = WITHOUT_TOOLS.get(program, NOTES)
    runs, answers = conversation["runs"], conversation["answers"]
    if runs != [{"name": name} for name in expected.names]:
        return f"{title}: the tool ran with {runs}"
    is_right = len(answers) == len(expected.answers) and all(answers)
    if is_right and not is_model:
        pairs = zip(expected.answers, answers, strict=True)
        is_right = all(part in answer for part, answer in pairs)
    return "" if is_right else f"{title}: the answers are {answers}"
