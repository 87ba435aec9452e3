"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table


def show_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], most: int | None = None) -> None:
    """Prints rows of texts, which may come from a file; nothing where there are none.

    Args:
        title: Stands above the table.
        heads: The columns; ``>`` before a name aligns its column to the right. No line of heads where all are empty.
        rows: The cells.
        most: The most rows to print, all when ``None``; a line below the table counts the others.
    """
    from onnxplug.cli.report import out
    from onnxplug_tools.inspection.words import visible

    every = list(rows)
    if not every:
        return
    table = Table(title=escape(visible(title)) or None, title_justify="left", show_header=any(heads))
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head.startswith(">") else "left")
    for row in every[:most]:
        table.add_row(*[escape(visible(cell)) for cell in row])
    out.print(table)
    if most is not None and len(every) > most:
        out.print(f"and {len(every) - most} more; --html FILE and --json have all", markup=False)
