"""Write release/install_cell.py into every notebook, as the cell that installs specjax.

    python release/write_install_cell.py            # write; release/address.py does so, too
    python release/write_install_cell.py --check    # exit with 1 if a notebook has another cell

While pyproject.toml, [tool.specjax], has no public address, the cell's SOURCE is empty.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CELL = ROOT / "release" / "install_cell.py"
FIRST_LINE = CELL.read_text(encoding="utf-8").splitlines()[0]
"""The line that marks the cell in a notebook."""


def render_cell(root: Path = ROOT) -> str:
    """Return the text of the cell, with the address in ``root``/pyproject.toml as its source."""
    address = (
        tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
        .get("specjax", {})
        .get("address")
    )
    source = f"git+{address}" if address else ""
    return (
        CELL.read_text(encoding="utf-8")
        .replace('SOURCE = ""', f'SOURCE = "{source}"', 1)
        .rstrip("\n")
    )


def find_cell(notebook: dict[str, Any]) -> dict[str, Any] | None:
    """Return the cell that installs specjax, or None if the ``notebook`` has none."""
    return next(
        (cell for cell in notebook["cells"] if "".join(cell["source"]).startswith(FIRST_LINE)), None
    )


def main() -> int:
    """Write the cell, or with --check name the notebooks that differ; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a notebook differs"
    )
    check = parser.parse_args().check
    expected = render_cell()
    differing = 0
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cell = find_cell(notebook)
        if cell is None:
            sys.exit(
                f"{path.name}: has no cell that begins with {FIRST_LINE!r}; add one with that line"
                " alone"
            )
        if "".join(cell["source"]) == expected:
            continue
        differing += 1
        remedy = "differs: run python release/write_install_cell.py" if check else "is written"
        print(f"{path.relative_to(ROOT).as_posix()} {remedy}")
        if not check:
            cell["source"] = expected.splitlines(keepends=True)
            path.write_text(
                json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
    return int(check and differing > 0)


if __name__ == "__main__":
    sys.exit(main())
