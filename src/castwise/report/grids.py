"""A table as plain text, which the terminal and the page show each in its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Grid", "Row", "terminal"]

_STYLES = {
    "chosen": "bold green", "fast": "green", "no gain": "dim", "avoid": "yellow", "stopped": "yellow",
    "unsupported": "yellow", "failed": "yellow",
}  # fmt: skip
"""Colours of rows in the terminal, by status."""
_WORDS = ("plan", "region", "modules", "module", "format", "operator", "verdict", "why")
"""Columns that hold words; the others hold numbers, which stand to the right."""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        cells: As many as the table has columns; ``-`` where something was not measured.
        status: What sets the row apart, such as ``chosen`` or ``failed``; else empty.
        why: The reason of it, in a clause.
    """

    cells: tuple[str, ...]
    status: str = ""
    why: str = ""

    @property
    def tag(self) -> str:
        """The status, where a page says it beside the name."""
        return self.status if self.status in ("chosen", "baseline", "rejected") else ""


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        title: What it is about.
        header: Column names; the first column holds what rows are about.
        rows: From the top down.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]

    def where(self, keep: Callable[[Row], bool]) -> Grid:
        """The table with some of its rows."""
        return Grid(self.title, self.header, tuple(row for row in self.rows if keep(row)))

    def first(self, count: int) -> Grid:
        """The table with at most so many rows."""
        return Grid(self.title, self.header, self.rows[:count])

    def only(self, title: str, *columns: str) -> Grid:
        """A narrower table.

        Args:
            title: Of it.
            columns: Names in the header, or ``why``.
        """
        places = [self.header.index(name) if name in self.header else -1 for name in columns]
        cells = (tuple(row.why if at < 0 else row.cells[at] for at in places) for row in self.rows)
        made = (Row(new, row.status, row.why) for new, row in zip(cells, self.rows, strict=True))
        return Grid(title, columns, tuple(made))


def terminal(grid: Grid, wrap: bool = True) -> Table:
    """The table for ``rich.print``; a chosen row is marked.

    Args:
        grid: The table.
        wrap: Whether numbers may wrap where space is short, or only words.

    Returns:
        Something rich can print.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=grid.title, title_justify="left", title_style="bold cyan", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )  # fmt: skip
    marked = any(row.status == "chosen" for row in grid.rows)
    if marked:
        table.add_column("")
    for name in grid.header:
        words = name in _WORDS
        table.add_column(
            Text(name), justify="left" if words else "right", overflow="fold", no_wrap=not (words or wrap),
            min_width=12 if name == "plan" else None,
        )  # fmt: skip
    for row in grid.rows:
        name, *cells = row.cells
        if grid.header[0] == "plan":
            name = name.replace("+", " +")  # so that a plan's line may wrap between its parts
        mark = [">" if row.status == "chosen" else ""] if marked else []
        table.add_row(*map(Text, [*mark, name, *cells]), style=_STYLES.get(row.status))
    return table
