"""The events of a text while a client generates it, and the report at the end."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass(frozen=True)
class CommittedEvent:
    """Committed tokens. They are the target's own text, and stay.

    Attributes:
        kind: the name of this event in reports.
        tokens: the token ids.
        text: the text of the tokens. If a token ends within a character, the text of that
            character comes with a later event.
        confirmed: how many of the tokens, counted from the first, were already shown as
            provisional.

    Examples:
        >>> from specjax.client import CommittedEvent
        >>> CommittedEvent(tokens=(702, 221), text="import ").confirmed
        0
    """

    kind: ClassVar[Literal["committed"]] = "committed"

    tokens: tuple[int, ...]
    text: str
    confirmed: int = 0


@dataclass(frozen=True)
class ProvisionalEvent:
    """Provisional tokens from the drafter alone, because no answer came.

    They follow all tokens before them, and may be retracted.

    Attributes:
        kind: the name of this event in reports.
        tokens: the token ids.
        text: the text of the tokens.

    Examples:
        >>> from specjax.client import ProvisionalEvent
        >>> ProvisionalEvent(tokens=(709,), text="os").text
        'os'
    """

    kind: ClassVar[Literal["provisional"]] = "provisional"

    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class RetractedEvent:
    """The last provisional tokens, which are removed because the target generates other ones.

    Attributes:
        kind: the name of this event in reports.
        tokens: the token ids.
        text: the text of the tokens.

    Examples:
        >>> from specjax.client import RetractedEvent
        >>> RetractedEvent(tokens=(709,), text="os").tokens
        (709,)
    """

    kind: ClassVar[Literal["retracted"]] = "retracted"

    tokens: tuple[int, ...]
    text: str


TextEvent = CommittedEvent | ProvisionalEvent | RetractedEvent
"""An event of a text."""


@dataclass
class TextReport:
    """The text so far, and its statistics.

    Attributes:
        text: the committed text.
        tokens: the ids of the committed tokens.
        provisional: the provisional text after the committed text. It is empty at the end unless
            the server was unreachable.
        provisional_tokens: the ids of the provisional tokens.
        finish_reason: "stop", "length", or "offline" if the server was unreachable; None until the
            text ends.
        grammar_completed: whether the committed text satisfies its grammar as a whole; None without
            a grammar, and until the text ends.
        seconds: the time from start to end.
        rounds: the number of verdicts.
        drafted: the number of tokens on the longest paths of all drafts that have a verdict.
        accepted: the number of accepted tokens.
        kept: the number of rounds whose draft was made before the previous verdict came.
        retracted: the number of provisional tokens that were removed.
        resumes: how often the text was continued over a new connection.
        bytes_up: the bytes sent.
        bytes_down: the bytes received.
        round_trips: the seconds of each round, verification included.
        depths: the depth of each draft that was sent.

    Examples:
        >>> from specjax.client import TextReport
        >>> TextReport(rounds=4, accepted=9).tokens_a_round
        3.25
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    provisional: str = ""
    provisional_tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    grammar_completed: bool | None = None
    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    kept: int = 0
    retracted: int = 0
    resumes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    round_trips: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    @property
    def tokens_a_round(self) -> float:
        """The mean number of tokens that a verdict commits."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0
