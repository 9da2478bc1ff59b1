"""Tables and a picture of the results of `benchmarks.serving`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.arrivals_pictures import Spread, draw_by_clients
from benchmarks.arrivals_tables import number, spread
from specjax.reports.tables import table_of_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def clients_picture(results: Mapping[str, Any], temperature: float = 0.0) -> "Figure":
    """Draw every server at every number of clients."""
    cases = [case for case in results["clients"] if case["temperature"] == temperature]
    settings = results["settings"]

    def lines(figure: str) -> dict[str, dict[int, Spread]]:
        return {
            name: {
                case["clients"]: Spread(**case["servers"][name][figure])
                for case in cases
                if figure in case["servers"][name]
            }
            for name in cases[0]["servers"]
        }

    size = f"{results['parameters']['target'] / 1e6:.0f}M parameters, float32"
    title = (
        f"Servers of one model, {size}; {settings['shortest']} to {settings['longest']} new tokens"
        " a request"
    )
    return draw_by_clients(title, lines("tokens_per_second"), lines("seconds_per_request_p50"))


def show(results: Mapping[str, Any], console: Console) -> None:
    """Print a table for each part."""
    for part, tables in TABLES.items():
        if part in results:
            for table in tables(results[part]):
                console.print(table)


def clients(cases: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Yield the tables of every server at every number of clients."""
    headers = (
        "clients",
        "temperature",
        "server",
        "tokens/s",
        "s a request",
        "first token s",
        "ms a token",
        "ms a pause",
    )
    table = table_of_numbers(
        "servers; times are medians over repeats of p50 | p90", *headers, "requests"
    )
    for case in cases:
        for name, run in case["servers"].items():
            times = [percentiles(run, figure, scale) for figure, scale in TIMES.items()]
            rate, count = spread(run["tokens_per_second"]), f"{run['requests']['middle']:.0f}"
            table.add_row(
                str(case["clients"]), f"{case['temperature']:g}", name, rate, *times, count
            )
        table.add_section()
    yield table


TIMES = {"seconds_per_request": 1.0, "first_token": 1.0, "between_tokens": 1e3, "pause": 1e3}
"""The times of a run, with their units' factors."""


def percentiles(run: Mapping[str, Any], figure: str, scale: float = 1.0) -> str:
    """Format the two stored percentiles of a time."""
    values = [run.get(f"{figure}_p{quantile}") for quantile in (50, 90)]
    return " | ".join("-" if value is None else number(scale * value["middle"]) for value in values)


def agreement(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the table of whether all servers have the same model."""
    table = table_of_numbers(
        "greedy texts as of specjax.generate",
        "server",
        "same",
        "prompts",
        "margins elsewhere",
        named=True,
    )
    for name, row in results.items():
        margins = ", ".join(f"{margin:.1e}" for margin in row["margins"])
        table.add_row(name, str(row["same"]), str(row["prompts"]), margins or "-")
    yield table


def http(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the table of the cost of HTTP."""
    table = table_of_numbers(
        f"the same requests, {results['clients']} clients", "", "tokens/s", named=True
    )
    for way, rate in results["tokens_per_second"].items():
        table.add_row(way, spread(rate))
    table.add_row("http over engine", spread(results["http_over_engine"]))
    yield table


def prediction(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the table of a long text with and without a predicted output."""
    title = (
        f"{results['tokens']} tokens, {results['lines']} lines, of which the prediction has every"
        " tenth wrong"
    )
    table = table_of_numbers(title, "server", "without, tokens/s", "with", "gain", named=True)
    for name, row in results["servers"].items():
        rates = [spread(row["tokens_per_second"][way]) for way in ("without", "with")]
        table.add_row(name, *rates, f"{row['gain']:.2f}")
    yield table


TABLES: dict[str, Callable[[Any], Iterator[Table]]] = {
    "agreement": agreement,
    "clients": clients,
    "http": http,
    "prediction": prediction,
}
"""The tables of each part, by its name in a results file."""
