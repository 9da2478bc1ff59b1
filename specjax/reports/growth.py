"""The figure of a client's text: its committed and provisional tokens over time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specjax.reports import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["committed", "provisional", "retracted"]
"""The kinds of events of a text."""


@dataclass(frozen=True)
class Moment:
    """An event of a text, and its time.

    Attributes:
        seconds: the time since the start.
        kind: the kind of event.
        tokens: the number of tokens.
        confirmed: how many of the committed tokens were shown as provisional before.

    Examples:
        >>> from specjax.client import CommittedEvent
        >>> from specjax.reports.growth import Moment
        >>> Moment.of(CommittedEvent(tokens=(702, 221), text="import "), seconds=0.5)
        Moment(seconds=0.5, kind='committed', tokens=2, confirmed=0)
    """

    seconds: float
    kind: Kind
    tokens: int
    confirmed: int = 0

    @classmethod
    def of(cls, event: Any, seconds: float) -> "Moment":
        """Make a moment of an event of `specjax.client`."""
        return cls(seconds, event.kind, len(event.tokens), getattr(event, "confirmed", 0))


@dataclass(frozen=True)
class Stand:
    """A token that was provisional.

    Attributes:
        place: the index of the token in the output.
        start: the time in seconds at which it was shown.
        end: the time in seconds at which it was committed or retracted.
        outcome: "committed", "retracted", or "provisional" if it was neither.
    """

    place: int
    start: float
    end: float
    outcome: Kind


def stands_of(moments: Sequence[Moment]) -> list[Stand]:
    """Return the provisional tokens of a text, in the order in which they were decided.

    Examples:
        >>> from specjax.reports.growth import Moment, stands_of
        >>> shown = [Moment(1.0, "provisional", 2), Moment(3.0, "retracted", 1)]
        >>> shown.append(Moment(3.0, "committed", 2, confirmed=1))
        >>> [(stand.place, stand.outcome) for stand in stands_of(shown)]
        [(1, 'retracted'), (0, 'committed')]
    """
    committed, shown, stands = 0, list[float](), list[Stand]()
    for moment in moments:
        if moment.kind == "provisional":
            shown += [moment.seconds] * moment.tokens
        elif moment.kind == "retracted":
            for _ in range(moment.tokens):
                stands.append(
                    Stand(committed + len(shown) - 1, shown.pop(), moment.seconds, "retracted")
                )
        else:
            confirmed = enumerate(shown[: moment.confirmed], committed)
            stands += [
                Stand(index, start, moment.seconds, "committed") for index, start in confirmed
            ]
            del shown[: moment.confirmed]
            committed += moment.tokens
    last = moments[-1].seconds if moments else 0.0
    return stands + [
        Stand(index, start, last, "provisional") for index, start in enumerate(shown, committed)
    ]


@style.styled
def draw_growth(
    title: str, moments: Sequence[Moment], away: Sequence[tuple[float, float]] = ()
) -> "Figure":
    """Draw tokens over time: a line of committed tokens, and a bar for each provisional token.

    A bar ends when its token is committed or retracted.

    Args:
        title: the title of the figure.
        moments: the events in order.
        away: begin and end in seconds of each time without a network.
    """
    theme = style.theme()
    figure, (axes,) = style.new_figure(3.4, title=title)
    for start, end in away:
        axes.axvspan(start, end, color=theme.grid, label="no network")
    times, counts = [0.0], [0]
    for moment in moments:
        if moment.kind == "committed":
            times.append(moment.seconds)
            counts.append(counts[-1] + moment.tokens)
    last = max(moment.seconds for moment in moments)
    axes.step(
        [*times, last],
        [*counts, counts[-1]],
        where="post",
        color=theme.accepted.edge,
        label="committed",
    )
    stands = stands_of(moments)
    kinds = {
        "committed": ("provisional, then committed", theme.drafted.edge),
        "retracted": ("provisional, then retracted", theme.rejected.edge),
        "provisional": ("provisional to the end", theme.passed_over.edge),
    }
    for outcome, (label, colour) in kinds.items():
        group = [stand for stand in stands if stand.outcome == outcome]
        if group:
            ys = [stand.place + 1 for stand in group]
            starts, ends = [stand.start for stand in group], [stand.end for stand in group]
            axes.hlines(ys, starts, ends, color=colour, linewidth=1.2, label=label)
    axes.set(xlabel="seconds", ylabel="tokens", xlim=(0, 1.02 * last))
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower left", ncols=2)
    return figure
