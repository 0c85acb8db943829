"""Build tables as plain text, which the terminal and the page display differently."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    "plan", "region", "modules", "module", "format", "formats", "operator", "tensor", "cast", "phase", "alarm", "state", "verdict", "grade", "effect",
    "why", "where", "outcome",
)  # fmt: skip
"""Columns that hold text. All other columns hold numbers, which are right-aligned."""


class Line(NamedTuple):
    """A paragraph of text, with the name of a style in rich."""

    text: str = ""
    style: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        cells: The text of each column; ``-`` if something was not measured.
        status: Status of the row, such as ``chosen`` or ``failed``; empty if it has none.
        why: The reason for the status, in a clause.
    """

    cells: tuple[str, ...]
    status: str = ""
    why: str = ""

    @property
    def tag(self) -> str:
        """The status as a page shows it beside the name; empty if the page does not show it."""
        return self.status if self.status in ("chosen", "baseline", "tie", "rejected", "not tried") else ""


@dataclass(frozen=True)
class Grid:
    """A table of text.

    Attributes:
        title: The title.
        header: Column names. The first column holds the names of the rows.
        rows: Rows from top to bottom.
        wraps: Whether numbers may wrap in a narrow terminal. Text may always wrap.
        spare: Columns that are left out, in this order, if the terminal is too narrow. They are named below the table.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    wraps: bool = True
    spare: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        title: str,
        records: Iterable[Mapping[str, Any]],
        columns: Columns,
        status: Said = "",
        why: Said = "",
        spare: tuple[str, ...] = (),
    ) -> Grid:
        """Make a table with one row for each record.

        Args:
            title: The title.
            records: Records from top to bottom.
            columns: For each column name, what to show of a record: a key of the record, or a function of it. ``-`` stands for
                None.
            status: The status of the row, given in the same way; empty for none.
            why: The reason for the status, given in the same way.
            spare: Columns that a narrow terminal leaves out first.
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
        return cls(title, tuple(columns), tuple(rows), spare=spare)

    def where(self, status: str, has: bool = True) -> Grid:
        """Return the table with only those rows that have a status or, if ``has`` is False, only those that do not."""
        return replace(self, rows=tuple(row for row in self.rows if (row.status == status) is has))

    def only(self, title: str, *columns: str) -> Grid:
        """Return a table of only these columns, one of which may be ``why``. Its numbers do not wrap."""
        places = [(*self.header, "why").index(name) for name in columns]
        rows = (replace(row, cells=tuple((*row.cells, row.why)[at] for at in places)) for row in self.rows)
        return Grid(title, columns, tuple(rows), wraps=False)


def opening(lines: Iterable[Grid | Line]) -> list[Grid | Line]:
    """Return the paragraphs before the first table or blank line: the answer and its context."""
    return list(itertools.takewhile(lambda part: isinstance(part, Line) and bool(part.text), lines))


def terminal(lines: Iterable[Grid | Line]) -> RenderableType:
    """Put tables and lines together, from top to bottom, for ``rich.print``."""
    from rich.console import Group
    from rich.text import Text

    return Group(
        *(_Fitted(part) if isinstance(part, Grid) else Text(part.text, part.style) for part in lines)
    )


@dataclass(frozen=True)
class _Fitted:
    """A table that is reduced if the terminal is too narrow to show whole words.

    Spare columns are left out first, so that names stay whole. Then additions to a number, such as an interval, move below the
    number. At last names wrap at a dot or an underscore.
    """

    grid: Grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        grid, room = self.grid, options.max_width
        waiting = [name for name in grid.spare if name in grid.header]
        while waiting and _width(grid, 1) + min(_longest(grid), _NAME) - _least(grid) > room:
            gone = waiting.pop(0)
            grid = grid.only(grid.title, *(name for name in grid.header if name != gone))
        fits = (level for level in range(len(_STACKED)) if _width(grid, level) <= room)
        level = next(fits, len(_STACKED) - 1)
        left = room - _width(grid, level) + _least(grid)
        if any(name in ("why", "where") for name in grid.header[1:]):
            left -= _WRAPPED
        hidden = [name for name in self.grid.header if name not in grid.header]
        yield _table(grid, level, min(_longest(grid), max(left, _least(grid))), hidden)


_NAME, _WRAPPED = 32, 10
"""``_NAME`` is the length up to which a name is kept on one line by leaving out columns. ``_WRAPPED`` is the width that is kept
for a column of reasons (``why``) or places (``where``)."""


def _longest(grid: Grid) -> int:
    """Return the width of the longest name in the first column."""
    return max(len(name) for name in (grid.header[0], *(row.cells[0] for row in grid.rows)))


def _least(grid: Grid) -> int:
    """Return the width that the first column needs so that no part of a name is broken; a plan's line may break at a ``+``."""
    names = [grid.header[0], *(row.cells[0] for row in grid.rows)]
    words = [word for name in names for word in breakable(name).split()]
    parts = words if grid.header[0] == "plan" else [part for word in words for part in _pieces(word)]
    return max(map(len, parts), default=0)


def _pieces(word: str) -> list[str]:
    return re.split(r"(?<=\w)(?=[._])", word)


def _folded(name: str, width: int) -> str:
    """Break a name at dots and underscores into several lines, if it is longer than its column."""
    words = []
    for word in name.split(" "):
        rows = [""]
        for part in _pieces(word) if len(word) > width else [word]:
            if rows[-1] and len(rows[-1] + part) > width:
                rows.append(part)
            else:
                rows[-1] += part
        words.append("\n".join(rows))
    return " ".join(words)


_STACKED = (None, re.compile(r" (?=\(|to )"), re.compile(r" (?=\(|to |±)"))
"""Positions at which numbers wrap, for a wide terminal first and a narrow one last."""


def _cell(text: str, level: int, head: bool = False) -> str:
    """Return the text of a cell in a column of numbers, wrapped for a terminal of this ``level`` of narrowness."""
    at = _STACKED[level]
    if at is None:
        return text
    return re.sub(" |(?=_)", "\n", text) if head else at.sub("\n", text)


def _width(grid: Grid, level: int) -> int:
    """Return the terminal width that a table needs so that no number and no word of a plan's name is broken."""
    out = 3 + (3 if any(row.status == "chosen" for row in grid.rows) else 0) + _least(grid)
    columns = zip(grid.header, *(row.cells for row in grid.rows), strict=True)
    for name, *cells in list(columns)[1:]:
        shown = [_cell(name, level, head=True), *(_cell(cell, level) for cell in cells)]
        parts = [
            part
            for text in shown
            for part in (breakable(text).split() if name in WORDS else text.split("\n"))
        ]
        out += max(map(len, parts), default=0) + 2
    return out


def breakable(plan: str) -> str:
    """Return a plan's line with spaces, so that a terminal may break it between its parts."""
    return plan.replace("+", " +")


def _table(grid: Grid, level: int, first: int, hidden: Sequence[str] = ()) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(grid.title), title_justify="left", title_style="bold cyan", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True,
        caption=Text(f"No room for: {', '.join(hidden)}") if hidden else None, caption_justify="left",
    )  # fmt: skip
    marked = any(row.status == "chosen" for row in grid.rows)
    if marked:
        table.add_column("")
    for place, name in enumerate(grid.header):
        words = name in WORDS
        head = name if words else _cell(name, level, head=True)
        table.add_column(
            Text(head), justify="left" if words else "right", overflow="fold", no_wrap=not words and not grid.wraps,
            width=first if place == 0 and words and name != "plan" else None,
        )  # fmt: skip
    for row in grid.rows:
        name, *cells = row.cells
        name = breakable(name) if grid.header[0] == "plan" else _folded(name, first)
        cells = [
            cell if head in WORDS else _cell(cell, level)
            for head, cell in zip(grid.header[1:], cells, strict=True)
        ]
        mark = [">" if row.status == "chosen" else ""] if marked else []
        table.add_row(*map(Text, [*mark, name, *cells]), style=_STYLES.get(row.status))
    return table
