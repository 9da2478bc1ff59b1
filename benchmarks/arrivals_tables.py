"""Tables and pictures of the results of `benchmarks.arrivals`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.arrivals_pictures import Spread, Stay, draw_by_rate, draw_rows
from specjax.reports.tables import table_of_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rows_picture(results: Mapping[str, Any], draft: str = "plain") -> "Figure":
    """Draw who had which row when, in static batches and in the engine."""
    batches = next(entry for entry in results["batches"] if entry["draft"] == draft)
    names = {"static": "static batches", "continuous": "continuous batching"}
    panels = {
        names[way]: [Stay(**stay) for stay in stays] for way, stays in batches["stays"].items()
    }
    settings = results["settings"]
    how = "plain decoding" if draft == "plain" else f"draft {draft}"
    sizes = f"{settings['shortest']} to {settings['longest']} new tokens each"
    return draw_rows(
        f"{settings['requests']} requests at once, {sizes}; {how}", panels, settings["rows"]
    )


def rates_picture(results: Mapping[str, Any]) -> "Figure":
    """Draw every engine at every arrival rate."""
    rates, settings = results["rates"]["rates"], results["settings"]

    def lines(figure: str) -> dict[str, dict[float, Spread]]:
        names = rates[0]["engines"]
        return {
            name: {
                row["requests_per_minute"]: Spread(**row["engines"][name][figure]) for row in rates
            }
            for name in names
        }

    sizes = (
        f"{settings['shortest']} to {settings['longest']} new tokens each, {settings['rows']} rows"
    )
    most = results["rates"]["plain_requests_per_minute"]
    return draw_by_rate(
        f"Requests that arrive at random, {sizes}",
        lines("tokens_per_second"),
        lines("seconds_per_request"),
        most,
    )


def show(results: Mapping[str, Any], console: Console) -> None:
    """Print a table for each part."""
    for part, tables in TABLES.items():
        if part in results:
            for table in tables(results[part]):
                console.print(table)


def batches(rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Yield the table of static batches and the engine."""
    table = table_of_numbers(
        "requests a minute",
        "draft",
        "static",
        "continuous",
        "gain",
        "ideal",
        "same text",
        named=True,
    )
    for row in rows:
        ways = [spread(row["requests_per_minute"][way]) for way in ("static", "continuous")]
        table.add_row(
            row["draft"],
            *ways,
            spread(row["gain"]),
            f"{row['ideal']:.2f}",
            f"{row['same_tokens']:.0%}",
        )
    yield table


def rates(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of every engine at every rate, and of the choice by load."""
    most = results["plain_requests_per_minute"]
    headers = (
        "arrive a minute",
        "engine",
        "tokens/s",
        "finished a minute",
        "s a request",
        "first token s",
        "s a token",
    )
    table = table_of_numbers(
        f"plain decoding finishes {number(most)} requests a minute at most; times are mean | p90",
        *headers,
    )
    for row in results["rates"]:
        for name, run in row["engines"].items():
            whole = [
                spread(run[figure])
                for figure in ("tokens_per_second", "requests_per_minute", "seconds_per_request")
            ]
            times = [
                f"{run[figure]['middle']:.3g} | {run[figure + '_p90']['middle']:.3g}"
                for figure in TIMES
            ]
            table.add_row(
                f"{number(row['requests_per_minute'])} ({row['share']:g})", name, *whole, *times
            )
        if "by_load_over_better" in row:
            table.add_row(
                "", f"{row['by_load_over_better']:.2f} of the better", f"by {row['compared_by']}"
            )
        table.add_section()
    yield table
    if not results["choice"]:
        return
    table = table_of_numbers(
        "what the choice by load goes by",
        "rows",
        "draft",
        "ms a step",
        "tokens a step",
        "times taken",
    )
    for line in results["choice"]:
        figures = (
            f"{1e3 * line['seconds_a_step']:.2f}",
            f"{line['tokens_a_step']:.2f}",
            str(line["taken"]),
        )
        table.add_row(str(line["rows"]), line["draft"], *figures)
    yield table


TIMES = ("first_token", "seconds_per_token")


def prefix(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the table of requests with a common prefix and others."""
    headers = ("", "prompt tokens computed", "taken over", "pages", "seconds")
    table = table_of_numbers("requests that begin alike", *headers, named=True)
    for name in ("shared", "separate"):
        row = results[name]
        counts = [
            f"{row[figure]['middle']:.0f}"
            for figure in ("prompt_tokens_read", "prompt_tokens_shared", "pages_held")
        ]
        table.add_row(name, *counts, spread(row["seconds"]))
    yield table


def first_token(rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Yield the table of the time to the first token."""
    table = table_of_numbers(
        "first token where a row is free", "prompt tokens", "chunks", "decode calls", "seconds"
    )
    for row in rows:
        counts = str(row["prompt_tokens"]), str(row["chunks"]), spread(row["decode_calls"])
        table.add_row(*counts, spread(row["seconds"]))
    yield table


TABLES: dict[str, Callable[[Any], Iterator[Table]]] = {
    "batches": batches,
    "rates": rates,
    "prefix": prefix,
    "first_token": first_token,
}
"""The tables of each part, by its name in a results file."""


def spread(values: Mapping[str, float], digits: int = 3) -> str:
    """Format a `Spread` of a results file."""
    low, middle, high = (number(values[name], digits) for name in ("low", "middle", "high"))
    return f"{middle} ({low}-{high})"


def number(value: float, digits: int = 3) -> str:
    """Format a number with significant digits, never as a power of ten."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
