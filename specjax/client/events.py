"""What a client tells of a text while it grows."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass(frozen=True)
class CommittedEvent:
    """Tokens that stay: the target's own text.

    Attributes:
        kind: the name of such an event in reports.
        tokens: their ids.
        text: what they say; a token may be a part of a character, whose text comes with a later one.
        confirmed: so many of the tokens, the first ones, stood there as provisional already, and still do.

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
    """Tokens that the drafter has written alone, because no answer came: they follow what there is, and may be retracted.

    Attributes:
        kind: the name of such an event in reports.
        tokens: their ids.
        text: what they say.

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
    """Provisional tokens that the target would not have written: the last ones, which are taken back.

    Attributes:
        kind: the name of such an event in reports.
        tokens: their ids.
        text: what they said.

    Examples:
        >>> from specjax.client import RetractedEvent
        >>> RetractedEvent(tokens=(709,), text="os").tokens
        (709,)
    """

    kind: ClassVar[Literal["retracted"]] = "retracted"

    tokens: tuple[int, ...]
    text: str


TextEvent = CommittedEvent | ProvisionalEvent | RetractedEvent
"""What happens to a text."""


@dataclass
class TextReport:
    """What a text has come to, and what it took.

    Attributes:
        text: what is committed.
        tokens: likewise.
        provisional: what follows it, written by the drafter alone; empty unless the server stayed away.
        provisional_tokens: likewise.
        finish_reason: "stop", "length", or "offline" where the server stayed away; None while it goes on.
        seconds: from the beginning to the end.
        rounds: verdicts.
        drafted: tokens on the longest paths of what was sent.
        accepted: of those.
        kept: rounds whose draft was there already when the verdict before came.
        retracted: tokens that were provisional, and wrong.
        resumes: how often the text was gone on with over another connection.
        bytes_up: sent.
        bytes_down: received.
        round_trips: seconds of each round, the server's own included.
        depths: of each draft that was sent.

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
        """Committed by a verdict, in the mean."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0
