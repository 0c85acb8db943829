"""Terminal tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from castwise.report import text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["bench_table"]


def bench_table(record: Mapping[str, Any]) -> RenderableType:
    """A bench's answer, its tables and remarks, for ``rich.print``; readable from 80 columns on.

    Args:
        record: As ``BenchResult.to_dict`` gives it.

    Returns:
        Something rich can print.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(text.headline(record), style="bold"), Text()]
    for grid in text.grids(record):
        table = Table(
            title=grid.title,
            title_justify="left",
            title_style="bold cyan",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for index, name in enumerate(grid.header):
            table.add_column(Text(name), justify="right" if index else "left", overflow="fold")
        for number, row in enumerate(grid.rows):
            table.add_row(*map(Text, row), style="yellow" if number in grid.dim else None)
        parts.append(table)
    parts += [Text(note, style="yellow") for note in text.notes(record)]
    parts += [Text(text.interval_note(record), style="dim"), Text(text.where(record), style="dim")]
    return Group(*parts)
