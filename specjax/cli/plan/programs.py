"""Tables and JSON of programs that were compiled for chips that this machine need not have."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from specjax.chips import Chip
from specjax.lowering.compiled import Compiled
from specjax.reports.tables import table_of_numbers


def memory_table(title: str, programs: Sequence[Compiled], chip: Chip) -> Table:
    """Return a table of the memory of each program on one chip."""
    headers = (
        "program",
        "compiled s",
        "given GB",
        "inner GB",
        "all GB",
        f"of {chip.memory / 1e9:.0f} GB",
    )
    table = table_of_numbers(title, *headers, named=True)
    for program in programs:
        memory = program.memory
        table.add_row(
            program.name,
            f"{program.seconds:.0f}",
            f"{memory.arguments / 1e9:.2f}",
            f"{memory.temporaries / 1e9:.2f}",
            f"{memory.together / 1e9:.2f}",
            "fits" if memory.together <= chip.memory else "does not fit",
        )
    return table


def exchanges_of(program: Compiled) -> str:
    """Return the number of collectives of each kind, such as "64 all-reduce"."""
    return (
        ", ".join(f"{count} {kind}" for kind, count in sorted(program.collectives.items()))
        or "none"
    )


def program_as_json(program: Compiled) -> dict[str, Any]:
    """Return the fields of a program without its text, and the costs of a whole step."""
    totals = {
        name: getattr(program, name)
        for name in ("bytes", "collectives", "collective_bytes", "slice_bytes", "kernels", "cycles")
    }
    return {name: value for name, value in asdict(program).items() if name != "text"} | {
        "a_step": totals
    }
