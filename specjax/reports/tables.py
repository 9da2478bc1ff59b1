"""Tables: what those of numbers share."""

from rich.table import Table


def table_of_numbers(title: str, *headers: str) -> Table:
    """An empty table whose columns are flush right."""
    table = Table(*headers, title=title, title_justify="left", caption_justify="left")
    for column in table.columns:
        column.justify = "right"
    return table
