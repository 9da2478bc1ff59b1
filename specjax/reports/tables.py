"""Tables of numbers."""

from rich.table import Table


def table_of_numbers(title: str, *headers: str, named: bool = False) -> Table:
    """Return an empty table with right-aligned columns.

    ``named`` aligns the first column, which holds names, to the left.
    """
    table = Table(*headers, title=title, title_justify="left", caption_justify="left")
    for column in table.columns:
        column.justify = "right"
    if named:
        table.columns[0].justify, table.columns[0].no_wrap = "left", True
    return table
