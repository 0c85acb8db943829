"""A table as plain text, which the terminal and the page show each in its way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

Said = str | Callable[[Any], Any]
Columns = Mapping[str, Said]

_STYLES = {
    "chosen": "bold green", "fast": "green", "no gain": "dim", "avoid": "yellow", "stopped": "yellow",
    "unsupported": "yellow", "failed": "yellow",
}  # fmt: skip
"""Colours of rows in the terminal, by status."""
WORDS = (
    "plan", "region", "modules", "module", "format", "formats", "operator", "tensor", "cast", "phase", "alarm", "state", "verdict",
    "why", "where",
)  # fmt: skip
"""Columns that hold words; the others hold numbers, which stand to the right."""


class Line(NamedTuple):
    """A paragraph of text, and rich's name of its style."""

    text: str = ""
    style: str = ""


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
        return self.status if self.status in ("chosen", "baseline", "tie", "rejected", "not tried") else ""


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        title: What it is about.
        header: Column names; the first column holds what rows are about.
        rows: From the top down.
        wraps: Whether numbers may wrap where the terminal is narrow, or only words.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    wraps: bool = True

    @classmethod
    def of(
        cls,
        title: str,
        records: Iterable[Mapping[str, Any]],
        columns: Columns,
        status: Said = "",
        why: Said = "",
    ) -> Grid:
        """Make a table of records, one per row.

        Args:
            title: What it is about.
            records: From the top down.
            columns: By name what each says of a record: the name of a value, or a function of it; ``-`` for None.
            status: The row's status, said in the same way; empty for none.
            why: The reason of it.
        """

        def cell(said: Said, record: Mapping[str, Any]) -> str:
            value = said(record) if callable(said) else record[said] if said else ""
            return "-" if value is None else str(value)

        rows = (
            Row(
                tuple(cell(said, record) for said in columns.values()),
                cell(status, record),
                cell(why, record),
            )
            for record in records
        )
        return cls(title, tuple(columns), tuple(rows))

    def where(self, status: str, has: bool = True) -> Grid:
        """The table with the rows that have a status, or with the others."""
        return replace(self, rows=tuple(row for row in self.rows if (row.status == status) is has))

    def only(self, title: str, *columns: str) -> Grid:
        """A table of some of the columns, or of ``why``, whose numbers do not wrap."""
        places = [(*self.header, "why").index(name) for name in columns]
        rows = (replace(row, cells=tuple((*row.cells, row.why)[at] for at in places)) for row in self.rows)
        return Grid(title, columns, tuple(rows), wraps=False)


def terminal(lines: Iterable[Grid | Line]) -> RenderableType:
    """Tables and lines, from the top down, for ``rich.print``."""
    from rich.console import Group
    from rich.text import Text

    return Group(
        *(_Fitted(part) if isinstance(part, Grid) else Text(part.text, part.style) for part in lines)
    )


@dataclass(frozen=True)
class _Fitted:
    """A table that gives way where the terminal is too narrow to show whole words: what follows a number goes below it."""

    grid: Grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        fits = (level for level in range(len(_STACKED)) if _width(self.grid, level) <= options.max_width)
        yield _table(self.grid, next(fits, len(_STACKED) - 1))


_STACKED = (None, re.compile(r" (?=\(|to )"), re.compile(r" (?=\(|to |±)"))
"""Where numbers go on below, the less room there is."""


def _cell(text: str, level: int, head: bool = False) -> str:
    """What a column of numbers shows of a cell."""
    at = _STACKED[level]
    if at is None:
        return text
    return re.sub(" |(?=_)", "\n", text) if head else at.sub("\n", text)


def _width(grid: Grid, level: int) -> int:
    """Columns of the terminal that a table needs so that no number, and no word of a plan's name, is broken."""
    out = 4 if any(row.status == "chosen" for row in grid.rows) else 1
    for name, *cells in zip(grid.header, *(row.cells for row in grid.rows), strict=True):
        shown = [_cell(name, level, head=True), *(_cell(cell, level) for cell in cells)]
        parts = [
            part
            for text in shown
            for part in (breakable(text).split() if name in WORDS else text.split("\n"))
        ]
        out += max(map(len, parts), default=0) + 2
    return out


def breakable(plan: str) -> str:
    """A plan's line that a terminal may break between its parts."""
    return plan.replace("+", " +")


def _table(grid: Grid, level: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(grid.title), title_justify="left", title_style="bold cyan", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )  # fmt: skip
    marked = any(row.status == "chosen" for row in grid.rows)
    if marked:
        table.add_column("")
    for name in grid.header:
        words = name in WORDS
        head = name if words else _cell(name, level, head=True)
        table.add_column(
            Text(head), justify="left" if words else "right", overflow="fold", no_wrap=not words and not grid.wraps,
        )  # fmt: skip
    for row in grid.rows:
        name, *cells = row.cells
        if grid.header[0] == "plan":
            name = breakable(name)
        cells = [
            cell if head in WORDS else _cell(cell, level)
            for head, cell in zip(grid.header[1:], cells, strict=True)
        ]
        mark = [">" if row.status == "chosen" else ""] if marked else []
        table.add_row(*map(Text, [*mark, name, *cells]), style=_STYLES.get(row.status))
    return table
