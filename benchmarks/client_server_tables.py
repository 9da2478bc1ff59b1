"""Tables and pictures of the results of `benchmarks.client_server`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.arrivals_tables import number, spread
from specjax.reports import style
from specjax.reports.tables import table_of_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAYS = {"client": "the clients draft", "server": "the server drafts", "none": "nobody drafts"}
"""The ways to draft, in words."""

# --- tables ---------------------------------------------------------------------------------------


def show(results: Mapping[str, Any], console: Console) -> None:
    """Print the tables of each part."""
    for part, tables in TABLES.items():
        if part in results:
            for table in tables(results[part]["found"]):
                console.print(table)


def bytes_(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the table of a round's bytes, by the formula and in our frames."""
    title = (
        f"KB of a round, {results['shape']}: {results['nodes']} nodes up, {results['tokens']}"
        " tokens down"
    )
    ways = ("formula, float16", "float32", "float16", "int8")
    table = table_of_numbers(
        title,
        "drafter",
        "up, formula",
        "up",
        *(f"down, {way}" for way in ways),
        "ms, float16",
        named=True,
    )
    for row in results["rows"]:
        down = [row["formula"]["down"], *row["ours"]["down"].values()]
        sizes = [kilobytes(size) for size in (row["formula"]["up"], row["ours"]["up"], *down)]
        table.add_row(row["drafter"], *sizes, f"{row['milliseconds']['float16']:.1f}")
    yield table


def kilobytes(size: float) -> str:
    """Format bytes in units of 1024."""
    return f"{size / 1024:.2f}" if size < 10_240 else f"{size / 1024:.1f}"


def cut(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the table of how much of the target's text is written alone."""
    for name, rows in results["rows"].items():
        shares = list(rows[0]["right"])
        title = f"{name}: {results['texts']} texts, cut after {results['written']} tokens"
        headers = ("tokens until the first difference", *(f"right of {count}" for count in shares))
        table = table_of_numbers(title, "drafter", *headers, named=True)
        for row in rows:
            until = f"{row['until_first_difference']:.1f} +- {row['error']:.1f}"
            table.add_row(
                row["drafter"], until, *(f"{row['right'][count]:.2f}" for count in shares)
            )
        yield table


def compression(rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Yield the table of number formats."""
    table = table_of_numbers(
        "how numbers are sent", "drafter", "", "tokens a round", "bytes down a token", named=True
    )
    for row in rows:
        table.add_row(
            row["drafter"],
            row["precision"],
            f"{row['tokens_a_round']:.3f}",
            str(row["bytes_a_token"]),
        )
    yield table


def networks(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of every method over every network, and of the rounds."""
    names = results["round_trips"]
    table = table_of_numbers(
        "tokens/s, by network: median (low-high)", "", *names, "the drafter alone", named=True
    )
    for method, runs in results["methods"].items():
        rates = [
            spread(runs[name]["tokens_per_second"]) if name in runs else "-"
            for name in (*names, "alone")
        ]
        table.add_row(method, *rates)
    yield table
    headers = (
        "tokens a round",
        "depth",
        "kept",
        "ms a round",
        "s beside rounds",
        "drafting, ms a token",
        "bytes up",
        "bytes down",
    )
    table = table_of_numbers("rounds", "", "network", *headers, named=True)
    for method, runs in results["methods"].items():
        for network in names:
            run = runs[network]
            if "rounds" not in run:
                continue
            middle = {name: values["middle"] for name, values in run.items()}
            figures = (
                f"{middle['tokens_a_round']:.2f}",
                f"{middle['depth']:.1f}",
                f"{middle['kept']:.0%}",
            )
            times = (
                f"{1e3 * middle['round_trip']:.0f}",
                number(middle["beside"], 2),
                f"{1e3 * middle['drafting']:.1f}",
            )
            table.add_row(
                method, network, *figures, *times, f"{middle['up']:.0f}", f"{middle['down']:,.0f}"
            )
    yield table


def clients(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the table by number of clients."""
    headers = ("tokens/s", "tokens a busy second", "tokens a pass", "busy", "cores of the clients")
    table = table_of_numbers(
        f"clients of one server, {results['drafter']}, {results['network']}",
        "",
        "clients",
        *headers,
        named=True,
    )
    for way, by_count in results["ways"].items():
        for count, run in by_count.items():
            rates = [
                spread(run[figure])
                for figure in ("tokens_per_second", "tokens_a_busy_second", "tokens_a_pass")
            ]
            table.add_row(
                WAYS[way],
                count,
                *rates,
                f"{run['busy']['middle']:.0%}",
                number(run["cores"]["middle"], 2),
            )
        table.add_section()
    yield table


TABLES: dict[str, Callable[[Any], Iterator[Table]]] = {
    "bytes": bytes_,
    "cut": cut,
    "compression": compression,
    "networks": networks,
    "clients": clients,
}
"""The tables of each part, by its name in a results file."""

# --- pictures -------------------------------------------------------------------------------------


@style.styled
def networks_picture(results: Mapping[str, Any]) -> "Figure":
    """Draw tokens per second over the round trip, for drafts of clients and of the server."""
    figures = results["networks"]["found"]
    trips, methods = figures["round_trips"], figures["methods"]
    by_server = {name: runs for name, runs in methods.items() if name.endswith(", on the server")}
    by_client = {
        name: runs for name, runs in methods.items() if "rounds" in next(iter(runs.values()))
    }
    (plain,) = [name for name in methods if name not in by_server and name not in by_client]
    wait = results["networks"]["settings"]["wait"]
    figure, (above, below) = style.new_figure(
        3.2, 3.2, title=f"One text at a time, a pass of the target takes {wait:.0f} ms and more"
    )
    for axes, lines in ((above, by_client), (below, by_server)):
        for name, runs in lines.items():
            label = name.removesuffix(", on the server")
            place = list(by_client).index(label)
            line(
                axes,
                trips,
                runs,
                label=label,
                fmt=f"{style.MARKERS[place]}-",
                color=style.theme().series[place],
            )
        line(axes, trips, methods[plain], label="no drafts", fmt="x--", color=style.theme().muted)
        axes.set_ylabel("tokens a second")
        axes.set_xlim(left=-2)
    top = 1.05 * max(
        runs[trip]["tokens_per_second"]["high"] for runs in methods.values() for trip in trips
    )
    for axes, title in (
        (above, "the client drafts"),
        (below, "the server drafts, and streams its text"),
    ):
        axes.set_title(title)
        axes.set_ylim(0, top)
    below.set_xlabel(
        "round trip, ms: "
        + ", ".join(f"{name} {trip:.0f}" for name, trip in trips.items() if name.endswith("G"))
    )
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return figure


def line(axes: "Axes", places: Mapping[str, float], runs: Mapping[str, Any], **look: Any) -> None:
    """Draw tokens per second, with bars from the smallest to the largest."""
    rates = [runs[name]["tokens_per_second"] for name in places]
    middle = [rate["middle"] for rate in rates]
    bars = [
        [rate["middle"] - rate["low"] for rate in rates],
        [rate["high"] - rate["middle"] for rate in rates],
    ]
    axes.errorbar(list(places.values()), middle, yerr=bars, **look)


@style.styled
def clients_picture(results: Mapping[str, Any]) -> "Figure":
    """Draw tokens per second, and per second of the server's work, over the number of clients."""
    figures = results["clients"]["found"]
    title = f"Clients of one server, {figures['drafter']}, {figures['network']}"
    figure, (above, below) = style.new_figure(3.2, 3.2, title=title)
    labels = {
        "tokens_per_second": "tokens a second",
        "tokens_a_busy_second": "tokens a second\nthat the target works",
    }
    for axes, (name, label) in zip((above, below), labels.items(), strict=True):
        for (way, by_count), marker in zip(figures["ways"].items(), style.MARKERS, strict=False):
            spreads = [run[name] for run in by_count.values()]
            bars = [
                [bar["middle"] - bar["low"] for bar in spreads],
                [bar["high"] - bar["middle"] for bar in spreads],
            ]
            middle = [bar["middle"] for bar in spreads]
            axes.errorbar(
                [int(count) for count in by_count],
                middle,
                yerr=bars,
                fmt=f"{marker}-",
                label=WAYS[way],
            )
        axes.set_ylabel(label)
        axes.set_xticks([int(count) for count in by_count])
        axes.set_ylim(bottom=0)
    below.set_xlabel("clients, each with one text")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return figure


@style.styled
def cut_picture(results: Mapping[str, Any]) -> "Figure":
    """Draw how many texts have no difference so far, over the tokens after the cut."""
    figures = results["cut"]["found"]
    title = f"A drafter alone, after {figures['written']} tokens of the target's"
    figure, panels = style.new_figure(*[3.0] * len(figures["rows"]), title=title)
    names = list(dict.fromkeys(row["drafter"] for rows in figures["rows"].values() for row in rows))
    for axes, (text, rows) in zip(panels, figures["rows"].items(), strict=True):
        for row in rows:
            place = names.index(row["drafter"])
            shares = row["unbroken"][:24]
            places = range(1, len(shares) + 1)
            look = {
                "marker": style.MARKERS[place],
                "markevery": 4,
                "color": style.theme().series[place],
            }
            axes.plot(places, shares, label=row["drafter"], **look)
        axes.set_title(text)
        axes.set_ylabel("texts like the target's so far")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter("{x:.0%}")
    panels[-1].set_xlabel("tokens after the cut")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return figure
