"""Speed of texts with penalties in the engine, and of texts beside them.

    python -m benchmarks.penalties --output penalties.json

*Without* is an engine that was started without programs for penalties. *Free* is the same texts in
an engine with them. *Beside one* is one free row beside others, of which one has penalties. In
*all*, every row has penalties. All runs are interleaved.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import decode
from benchmarks.grammars import Run, SpeedConfig, compare, show, start
from specjax.errors import InputError

PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1}


@dataclass(frozen=True)
class PenaltiesConfig(SpeedConfig):
    """Measure texts with penalties, and texts beside them."""


def runs_of(rows: int) -> dict[str, Run]:
    """Return the runs that are compared, the reference first."""
    free, adjusted = [{}] * rows, [PENALTIES] * rows
    runs = {
        "without": Run("without", free),
        "free": Run("with", free),
        "all": Run("with", adjusted),
    }
    if rows > 1:
        runs["beside none"] = Run("with", free, row=0)
        runs["beside one"] = Run("with", [*free[:-1], PENALTIES], row=0)
        runs["beside all others"] = Run("with", [{}, *adjusted[1:]], row=0)
    return runs


def main(config: PenaltiesConfig) -> None:
    """Measure, print the tables, and write the results."""
    bench = start(config, {"without": {"penalties": False}, "with": {"penalties": True}})
    results: dict[str, Any] = {"config": asdict(config), "machine": decode.machine()}
    try:
        for rows in config.rows:
            results[f"{rows} rows"] = measured = compare(bench, runs_of(rows), config)
            show("penalties", rows, measured)
    finally:
        for engine in bench.engines.values():
            engine.close()
    if config.output:
        decode.write(results, Path(config.output))


if __name__ == "__main__":
    try:
        main(tyro.cli(PenaltiesConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
