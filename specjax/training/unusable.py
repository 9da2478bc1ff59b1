"""Records that cannot be used: they are left out, counted and named, up to a share of all records.

`specjax train` and `specjax regenerate` have the same reader and the same limit.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.config import ConfigError
from specjax.files import write_text
from specjax.progress import say

MAX_UNUSABLE = 0.01
"""The default for the largest share of the records that may be left out."""

_PLACES = 5
"""The number of places that a message names for each reason."""

_REASONS = 10
"""The number of reasons that a message has."""

_ENOUGH = 1000
"""The number of records after which the share of those that are left out is worth a warning."""


def check_share(name: str, share: float) -> None:
    """Raise ConfigError unless a share of the records is from 0 to 1."""
    if not 0 <= share <= 1:
        raise ConfigError(f"{name}={share}: must be from 0 to 1")


class UnusableRecordError(ConfigError):
    """A record that cannot be used.

    Attributes:
        where: the place of the record: its file and its line.
        reason: why it cannot be used.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.reason)


class RecordTally:
    """The count of a source's records, and of those that are left out.

    Attributes:
        total: the number of records.
        unusable: the records that are left out.
        ignored: for each field of messages that is not understood, how many messages have it.

    Examples:
        >>> from specjax.training.unusable import RecordTally, UnusableRecordError
        >>> tally = RecordTally("chats.jsonl", limit=0.5)
        >>> tally.total = 3
        >>> tally.leave_out(UnusableRecordError("chats.jsonl:2", "it has no messages"))
        >>> tally.check()
        >>> tally.leave_out(UnusableRecordError("chats.jsonl:3", "it has no messages"))
        >>> tally.check()
        Traceback (most recent call last):
        specjax.config.ConfigError: data.source='chats.jsonl': 2 of 3 records cannot be used, ...
    """

    def __init__(
        self,
        source: str,
        argument: str = "data.source",
        limit: float = MAX_UNUSABLE,
        option: str = "data.max_unusable",
    ) -> None:
        """Start without records.

        Args:
            source: the source, for messages.
            argument: the name of the argument with the source.
            limit: the largest share of the records that may be left out; 0 raises for the first.
            option: the name of the option with the limit.
        """
        self._source, self._option, self._limit = f"{argument}={source!r}", option, limit
        self.total = 0
        self.unusable: list[UnusableRecordError] = []
        self.ignored: Counter[str] = Counter()
        self._has_warned = False

    def leave_out(self, error: UnusableRecordError) -> None:
        """Add a record that is left out.

        Raises:
            ConfigError: The limit is 0.
        """
        if not self._limit:
            raise ConfigError(
                f"{error}. Correct it, or allow a share with {self._option}"
            ) from None
        self.unusable.append(error)

    def check(self) -> None:
        """Raise ConfigError if more records are left out than the limit allows."""
        if len(self.unusable) > self._limit * self.total:
            raise ConfigError(
                f"{self._source}: {self._counted()} cannot be used, more than"
                f" {self._option}={self._limit:g} allows. {self._reasons()}. Correct them, or"
                f" allow more with {self._option}"
            )

    def report(self) -> None:
        """Print how many records are left out and why, and which fields are ignored."""
        if self.unusable:
            say(f"{self._source}: {self._counted()} are left out. {self._reasons()}")
        if self.ignored:
            listed = ", ".join(
                f"{name!r} ({count:,})" for name, count in self.ignored.most_common(_REASONS)
            )
            say(
                f"{self._source}: these fields of messages are not understood and ignored, with the"
                f" number of messages: {listed}{_more(len(self.ignored) - _REASONS)}"
            )

    def record(self) -> dict[str, Any]:
        """Return the counts as a JSON object for `restore`."""
        unusable = [(error.where, error.reason) for error in self.unusable]
        return {"total": self.total, "unusable": unusable, "ignored": dict(self.ignored)}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take the counts of an earlier tally of the same source, instead of its own.

        Raises:
            ConfigError: A record is left out, and the limit is 0.
        """
        self.total, self.unusable, self.ignored = 0, [], Counter()
        self._has_warned = True  # these are all records: there are no later ones to warn of
        self.merge(record)

    def merge(self, record: Mapping[str, Any]) -> None:
        """Add the counts of the `record` of a tally of more records.

        A line is printed as soon as more records are left out than the limit will allow, unless
        later records are better: the source may be large.

        Raises:
            ConfigError: A record is left out, and the limit is 0.
        """
        self.total += record["total"]
        self.ignored.update(record["ignored"])
        for where, reason in record["unusable"]:
            self.leave_out(UnusableRecordError(where, reason))
        exceeds = len(self.unusable) > self._limit * self.total
        if exceeds and self.total >= _ENOUGH and not self._has_warned:
            self._has_warned = True
            say(
                f"{self._source}: {self._counted()} so far cannot be used, more than"
                f" {self._option}={self._limit:g} allows. {self._reasons()}. If this goes on, the"
                " run will end after the last record"
            )

    def write(self, file: Path) -> None:
        """Write a line for each record that is left out; without any, remove the file."""
        if self.unusable:
            write_text(file, "".join(f"{error}\n" for error in self.unusable))
        else:
            file.unlink(missing_ok=True)

    def _counted(self) -> str:
        return f"{len(self.unusable):,} of {self.total:,} records"

    def _reasons(self) -> str:
        """Return the reasons, the most frequent first, each with the places of its records."""
        places: dict[str, list[str]] = {}
        for error in self.unusable:
            places.setdefault(error.reason, []).append(error.where)
        ordered = sorted(places, key=lambda reason: -len(places[reason]))
        shown = [
            f"{', '.join(places[reason][:_PLACES])}{_more(len(places[reason]) - _PLACES)}: {reason}"
            for reason in ordered[:_REASONS]
        ]
        return "; ".join(shown) + _more(len(ordered) - _REASONS, " reasons")


def _more(count: int, what: str = "") -> str:
    return f" and {count:,} more{what}" if count > 0 else ""
