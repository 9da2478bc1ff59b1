"""The results that the conversations of real programs must have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.clients.scripted import THOUGHT


@dataclass(frozen=True)
class _Expected:
    """The results of a conversation.

    Attributes:
        names: the names of the notes that the tool reads.
        answers: what is in each answer.
    """

    names: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]


_ALPHA, _BETA = "The ferry leaves at nine.", "The shop is closed."
_GOODBYE = ("Goodbye for now.",)
NOTES = _Expected(
    ("alpha", "beta", "alpha", "beta"), ((_ALPHA,), (_BETA,), (_ALPHA, _BETA), _GOODBYE)
)
ONE_BY_ONE = _Expected(("alpha", "beta"), ((_ALPHA,), (_BETA,), _GOODBYE))
PEOPLE = _Expected((), (("Ada, 36",), ("Bob, 7",)))
WORDS = _Expected((), (("Good morning",), ("Good evening",), ("Good night",)))
_EXPECTED = {"people": PEOPLE, "words": WORDS, "one by one": ONE_BY_ONE}


def fault_of(title: str, conversation: Mapping[str, Any], is_model: bool = False) -> str:
    """Return what is wrong with a conversation; empty: nothing is.

    The tool must have run as it was asked to, and the answers must be those of the rules, without
    the thought.

    Args:
        title: the title of the conversation. It begins with one of `_EXPECTED`, or it is the one
            with notes.
        conversation: the runs of the tool, and the answers, or an error.
        is_model: whether a model has answered, which may write any answer.
    """
    expected = _EXPECTED.get(title.partition(",")[0], NOTES)
    if "error" in conversation:
        return f"{title}: {conversation['error']}"
    runs, answers = conversation["runs"], conversation["answers"]
    # A program may run two tools at a time: in which order they begin is not determined.
    if sorted(map(str, runs)) != sorted(str({"name": name}) for name in expected.names):
        return f"{title}: the tool ran with {runs}"
    is_right = len(answers) == len(expected.answers) and all(answers)
    if is_right and not is_model:
        pairs = zip(expected.answers, answers, strict=True)
        is_right = all(
            all(part in answer for part in parts) and THOUGHT not in answer
            for parts, answer in pairs
        )
    return "" if is_right else f"{title}: the answers are {answers}"
