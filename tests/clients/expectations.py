"""The results that the conversations of real programs must have."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
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
_WITHOUT_TOOLS = ("people", "words")


def fault_of(title: str, conversation: Mapping[str, Any]) -> str:
    """Return what is wrong with a conversation; empty: nothing is.

    The tool must have run as it was asked to, and the answers must be those of the rules, without
    the thought.

    Args:
        title: the title of the conversation. It begins with one of `_EXPECTED`, or it is the one
            with notes.
        conversation: the runs of the tool, and the answers, or an error.
    """
    expected = _EXPECTED.get(title.partition(",")[0], NOTES)
    if "error" in conversation:
        return f"{title}: {conversation['error']}"
    runs, answers = conversation["runs"], conversation["answers"]
    expected_runs = [{"tool": "read_note", "arguments": {"name": name}} for name in expected.names]
    # A program may run two tools at a time: in which order they begin is not determined.
    if sorted(map(str, runs)) != sorted(map(str, expected_runs)):
        return f"{title}: the tool ran with {runs}"
    is_right = len(answers) == len(expected.answers) and all(
        all(part in answer for part in parts) and THOUGHT not in answer
        for parts, answer in zip(expected.answers, answers, strict=True)
    )
    return "" if is_right else f"{title}: the answers are {answers}"


@dataclass(frozen=True)
class Counts:
    """Counts of what a model has done in conversations with tools, and in those without.

    Attributes:
        calls: the number of calls that it should make.
        tools: how many of the tools that it should call it has called.
        arguments: how many of them with the right arguments.
        more: the number of calls that it should not make.
        texts: the number of texts that it should write.
        right_texts: how many of them are right.
        objects: the number of answers of a type, and of answers without tools.
        right_objects: how many of them have the right values.
    """

    calls: int = 0
    tools: int = 0
    arguments: int = 0
    more: int = 0
    texts: int = 0
    right_texts: int = 0
    objects: int = 0
    right_objects: int = 0

    def __add__(self, more: "Counts") -> "Counts":
        """Return the sums."""
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))

    def line(self) -> str:
        """Return the counts as a line."""
        parts = []
        if self.calls:
            parts += [f"{self.tools} of {self.calls} calls of the right tool"]
            parts += [f"{self.arguments} with the right arguments, {self.more} calls more"]
        if self.texts:
            parts += [f"{self.right_texts} of {self.texts} texts right"]
        if self.objects:
            parts += [f"{self.right_objects} of {self.objects} answers without these tools right"]
        return "; ".join(parts)


def counts_of(title: str, record: Mapping[str, Any], conversation: Mapping[str, Any]) -> Counts:
    """Count what a model did right in a conversation that a program has held.

    Calls are compared whatever their order, and a text after a result is right if it ends with it.
    After an error nothing more is right.

    Args:
        title: the title of the conversation.
        record: the runs of the tools, and the answers, or an error.
        conversation: the conversation that the program was given.
    """
    answers = record.get("answers", [])
    kind = title.partition(",")[0]
    if kind in _WITHOUT_TOOLS:
        expected = [parts[0] for parts in _EXPECTED[kind].answers]
        return Counts(objects=len(expected), right_objects=_count_ends(expected, answers))
    calls = [{name: call[name] for name in ("tool", "arguments")} for call in conversation["calls"]]
    tools = _count_common([call["tool"] for call in calls], [run["tool"] for run in record["runs"]])
    texts = conversation["answers"]
    return Counts(
        calls=len(calls),
        tools=tools,
        arguments=_count_common(calls, record["runs"]),
        more=len(record["runs"]) - tools,
        texts=len(texts),
        right_texts=_count_ends(texts, answers),
    )


def _count_common(expected: Sequence[Any], values: Sequence[Any]) -> int:
    """Return how many of the expected values there are; each value counts once."""
    rest = [*values]
    count = 0
    for value in expected:
        if value in rest:
            rest.remove(value)
            count += 1
    return count


def _count_ends(expected: Sequence[str], answers: Sequence[str]) -> int:
    return sum(
        answer.rstrip().endswith(text.rstrip())
        for text, answer in zip(expected, answers, strict=False)
    )
