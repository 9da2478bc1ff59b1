"""Write the guide's table of supported models from the families.

.venv/bin/python -m docs.model_table    rewrites the table in docs/guides/checkpoints.md
"""

from itertools import groupby
from pathlib import Path

from specjax.files import write_text
from specjax.models.families import FAMILIES

GUIDE = Path(__file__).parent / "guides/checkpoints.md"
HEADER = "| family | `model_type` | models |\n|---|---|---|\n"


def model_table() -> str:
    """Return the table in Markdown: a row for each title, in the order of `FAMILIES`."""
    titles = list(dict.fromkeys(family.title for family in FAMILIES.values()))
    by_title = sorted(FAMILIES.items(), key=lambda item: titles.index(item[1].title))
    rows = []
    for title, members in groupby(by_title, key=lambda item: item[1].title):
        families = dict(members)
        model_types = ", ".join(f"`{name}`" for name in families)
        texts = dict.fromkeys(family.models for family in families.values() if family.models)
        rows.append(f"| {title} | {model_types} | {'; '.join(texts)} |\n")
    return HEADER + "".join(rows)


def with_table(guide: str) -> str:
    """Return the guide with the table of today in place of its own."""
    before, _, rest = guide.partition(HEADER)
    after = rest.partition("\n\n")[2]
    return f"{before}{model_table()}\n{after}"


if __name__ == "__main__":
    write_text(GUIDE, with_table(GUIDE.read_text()))
