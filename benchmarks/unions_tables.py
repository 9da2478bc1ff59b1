"""Print the tables of docs/results/unions.md from the results.

python -m benchmarks.unions_tables
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tyro

from benchmarks.agent_session.answers import LARGEST_SHARE

RESULTS = Path(__file__).parent / "results" / "unions.json"


@dataclass(frozen=True)
class UnionTablesConfig:
    """Print the tables.

    Attributes:
        results: the file that ``python -m benchmarks.unions`` has written.
    """

    results: str = str(RESULTS)


def per_step(texts: list[dict[str, Any]]) -> float:
    """Return the mean number of tokens of a step; NaN without texts."""
    steps = sum(record["steps"] for record in texts)
    return sum(record["tokens"] for record in texts) / steps if steps else float("nan")


def shares(run: dict[str, Any], texts: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the share of accepted tokens that each part of a union offered, and alone offered."""
    accepted = max(sum(record["accepted"] for record in texts), 1)
    return {
        part: {
            label: sum(record[field][place] for record in texts) / accepted
            for label, field in (("offered", "by_part"), ("only", "only_by_part"))
        }
        for place, part in enumerate(run["parts"])
    }


def steady(texts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the texts that do not loop."""
    return [record for record in texts if record["repeated"] <= LARGEST_SHARE]


def counts_rows(runs: list[dict[str, Any]], temperature: float) -> list[dict[str, Any]]:
    """Return what the table of a temperature states: a row for each category, and one for all.

    Only texts that do not loop count. Unions are compared with the best single drafter of the row
    that was run; a drafter with parts is a union.
    """
    of_temperature = [run for run in runs if run["temperature"] == temperature]
    categories = dict.fromkeys(record["category"] for record in of_temperature[0]["texts"])
    rows = []
    for category in (*categories, "all"):
        lengths, parts, texts = {}, {}, []
        for run in of_temperature:
            texts = [record for record in run["texts"] if category in (record["category"], "all")]
            lengths[run["drafter"]] = per_step(steady(texts))
            if run["parts"]:
                parts[run["drafter"]] = shares(run, steady(texts))
        single = {name: length for name, length in lengths.items() if name not in parts}
        best = max(single, key=lambda name: single[name])
        rows.append(
            {
                "category": category,
                "texts": len(texts),
                "looping": len(texts) - len(steady(texts)),
                "lengths": lengths,
                "best": best,
                "against_best": {name: lengths[name] / single[best] for name in parts},
                "parts": parts,
            }
        )
    return rows


def same_as_plain(texts: dict[str, list[int]]) -> str:
    """Say how many texts of drafters are those of plain decoding, from checksums by drafter."""
    plain = texts["plain"]
    of_drafters = [checksums for name, checksums in texts.items() if name != "plain"]
    same = sum(sum(map(eq, checksums, plain)) for checksums in of_drafters)
    total = len(plain) * len(of_drafters)
    return f"{same} of {total} texts of drafters are those of plain decoding"


def counts_table(runs: list[dict[str, Any]]) -> str:
    """Return the tables of all temperatures: tokens a step, and what each part contributed."""
    blocks = []
    for temperature in dict.fromkeys(run["temperature"] for run in runs):
        rows = counts_rows(runs, temperature)
        names = [name for name in rows[0]["lengths"] if name != "plain"]
        unions = list(rows[0]["parts"])
        titles = ["category", "texts", "looping", *names]
        titles += [f"{name}: offered by, only by" for name in unions]
        lines = [
            "| " + " | ".join(titles) + " |",
            "|---|" + "---:|" * (2 + len(names)) + "---|" * len(unions),
        ]
        for row in rows:
            cells = [row["category"], str(row["texts"]), str(row["looping"])]
            for name in names:
                against = row["against_best"].get(name)
                ratio = f" ({against:.2f})" if against is not None else ""
                cells.append(f"{row['lengths'][name]:.2f}{ratio}")
            for name in unions:
                parts = row["parts"][name].items()
                cells.append(
                    "; ".join(f"{part} {it['offered']:.0%}, {it['only']:.0%}" for part, it in parts)
                )
            lines.append("| " + " | ".join(cells) + " |")
        texts = {
            run["drafter"]: [record["text"] for record in run["texts"]]
            for run in runs
            if run["temperature"] == temperature
        }
        blocks.append(f"T = {temperature:g}; {same_as_plain(texts)}\n\n" + "\n".join(lines))
    return "\n\n".join(blocks)


def rules_table(runs: list[dict[str, Any]]) -> str:
    """Return the table of drafters by rule: tokens a step over all seeds, and of each."""
    lines = ["| drafter, rule | tokens a step | of each seed |", "|---|---:|---|"]
    for run in runs:
        tokens, steps = (sum(total[place] for total in run["totals"]) for place in (0, 1))
        of_seeds = " ".join(f"{tokens / steps:.3f}" for tokens, steps in run["totals"])
        lines.append(f"| {run['name']} | {tokens / steps:.3f} | {of_seeds} |")
    return "\n".join(lines)


def speed_rows(runs: list[dict[str, Any]], temperature: float) -> list[dict[str, Any]]:
    """Return what the table of speed states of a temperature.

    The texts of all drafters are equal, so their times can be compared. Each is compared with that
    of the best single drafter for the same text in the same repeat, because the machine's speed may
    change. The best is the one with the largest median of tokens per second.
    """
    of_temperature = [run for run in runs if run["temperature"] == temperature]
    single = [run for run in of_temperature if not run["parts"]]
    best = max(single, key=lambda run: median(rates(run)))
    rows = []
    for run in of_temperature:
        ratios = [
            of_best / seconds
            for repeat, of_best_repeat in zip(run["seconds"], best["seconds"], strict=True)
            for seconds, of_best in zip(repeat, of_best_repeat, strict=True)
        ]
        lower, against_best, upper = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
        rows.append(
            {
                "drafter": run["drafter"],
                "rate": median(rates(run)),
                "least": min(rates(run)),
                "most": max(rates(run)),
                "against_best": against_best,
                "lower": lower,
                "upper": upper,
                "per_step": run["tokens"] / run["steps"],
                "nodes": run["scored"] / run["steps"],
            }
        )
    return rows


def rates(run: dict[str, Any]) -> list[float]:
    """Return the tokens per second of each repeat."""
    return [run["tokens"] / sum(seconds) for seconds in run["seconds"]]


def speed_table(speed: dict[str, Any]) -> str:
    """Return the tables of speed of all temperatures."""
    runs = speed["runs"]
    blocks = [f"{speed['parameters'] / 1e6:.0f}M parameters, load {speed['load']:.1f}"]
    for temperature in dict.fromkeys(run["temperature"] for run in runs):
        lines = [
            f"| T = {temperature:g} | tokens/s | against the best single one: median, quartiles |"
            " tokens a step | nodes a step, with the root |",
            "|---|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {row['drafter']} | {row['rate']:.0f} ({row['least']:.0f} to {row['most']:.0f}) |"
            f" {row['against_best']:.2f} ({row['lower']:.2f} to {row['upper']:.2f}) |"
            f" {row['per_step']:.2f} | {row['nodes']:.1f} |"
            for row in speed_rows(runs, temperature)
        ]
        texts = {run["drafter"]: run["texts"] for run in runs if run["temperature"] == temperature}
        blocks.append(f"{same_as_plain(texts)}\n\n" + "\n".join(lines))
    return "\n\n".join(blocks)


TABLES: dict[str, Callable[[Any], str]] = {
    "counts": counts_table,
    "rules": rules_table,
    "speed": speed_table,
}
"""The function that prints each part of the results."""


def main(config: UnionTablesConfig) -> None:
    """Print the tables of each pair."""
    for name, pair in json.loads(Path(config.results).read_text()).items():
        for part, measured in pair.items():
            if part in TABLES:
                print(f"## {name}, {part}\n\n{TABLES[part](measured)}\n")


if __name__ == "__main__":
    main(tyro.cli(UnionTablesConfig))
