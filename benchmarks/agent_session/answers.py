"""The answers of a session as tokens: what stands before each, and what the agent writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.agent_session.recorded import Turn

READ, WRITTEN = 1600, 400
"""The largest number of tokens that are read from a file, and of each answer and log."""
CAPACITY = 2816
"""The number of tokens that a turn has room for: those above, and headings."""
NGRAM = 16
LARGEST_SHARE = 0.3
"""A text loops if more of its tokens end a repeated n-gram; it is left out."""


@dataclass(frozen=True)
class Answer:
    """One answer of an agent.

    Attributes:
        turn: the number of its turn, from 0.
        kind: "edits" or "shown".
        prompt: the tokens of the turn before the answer.
        output: the tokens of the answer.
    """

    turn: int
    kind: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def repeated(self) -> float:
        """The share of output tokens that end a repeated n-gram of the output."""
        return repeated_share(self.output)


def repeated_share(tokens: Sequence[int]) -> float:
    """Return the share of tokens that end a repeated n-gram; 0 without tokens."""
    return float(repeated(tokens).mean()) if len(tokens) else 0.0


def repeated(tokens: Sequence[int], size: int = NGRAM) -> np.ndarray:
    """Return for each token whether the ``size`` tokens that end there have occurred before.

    Examples:
        >>> from benchmarks.agent_session.answers import repeated
        >>> repeated([1, 2, 3, 1, 2, 3, 1], size=2).tolist()
        [False, False, False, False, True, True, True]
    """
    before: set[tuple[int, ...]] = set()
    result = np.zeros(len(tokens), bool)
    for end in range(size, len(tokens) + 1):
        ngram = tuple(tokens[end - size : end])
        result[end - 1] = ngram in before
        before.add(ngram)
    return result


def answers_of(turns: Sequence[Turn], encode: Callable[[str], list[int]]) -> list[Answer]:
    """Return the answers of a session, two for each turn."""
    answers = []
    for index, turn in enumerate(turns):
        read = encode(f"# {turn.subject}\n# {turn.path}\n{turn.read}")[:READ]
        edits = encode(turn.edits)[:WRITTEN]
        log = encode(f"\n# Test\n{turn.log}")[-WRITTEN:]
        shown = encode(turn.shown)[:WRITTEN]
        before = (*read, *encode("\n# Edits\n"))
        answers.append(Answer(index, "edits", before, tuple(edits)))
        before = (*before, *edits, *log, *encode("\n# Now\n"))
        answers.append(Answer(index, "shown", before, tuple(shown)))
    return [answer for answer in answers if answer.output]


def earlier_texts(answers: Sequence[Answer], turn: int) -> list[tuple[int, ...]]:
    """Return the texts of the turns before a turn, one for each."""
    last = {answer.turn: answer for answer in answers if answer.turn < turn}
    return [answer.prompt + answer.output for answer in last.values()]
