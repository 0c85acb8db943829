"""The terminal table of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from castwise.report import text, tune_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["tune_table"]

MARK = ">"
_STYLES = {"chosen": "bold green", "sound": "", "baseline": ""}
_REJECTED = 12


def tune_table(record: Mapping[str, Any]) -> RenderableType:
    """A search's answer, the plans that it compared and why others were rejected, for ``rich.print``.

    Readable from 80 columns on; the chosen plan is marked.

    Args:
        record: As ``TuneResult.to_dict`` gives it.

    Returns:
        Something rich can print.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(tune_text.answer(record), style="bold"), Text()]
    rows = tune_text.plan_rows(record)
    kept = [row for row in rows if row.status != "rejected"]
    lost = [row for row in rows if row.status == "rejected"]
    if kept:
        marks = [MARK if row.status == "chosen" else "" for row in kept]
        styles = [_STYLES.get(row.status, "") for row in kept]
        names = [_breakable(row.name) for row in kept]
        speeds = [(m, n, r.step, r.speed, r.autocast) for m, n, r in zip(marks, names, kept, strict=True)]
        header: tuple[str, ...] = ("", "plan", "training step", "vs fp32", "vs autocast")
        parts.append(_table("Speed", header, speeds, styles, left=2))
        others = [
            (m, n, r.verdict, r.damage, r.peak, r.loss) for m, n, r in zip(marks, names, kept, strict=True)
        ]
        header = ("", "plan", "parity", "damage", "peak memory", "loss")
        parts.append(_table("Gradients and memory", header, others, styles, left=2))
    apart = [row for row in tune_text.region_rows(record) if row.apart]
    if apart:
        cells = [(row.pattern, row.kind, row.format, row.reason) for row in apart[:_REJECTED]]
        parts.append(_table("Kept in another format", ("region", "modules", "format", "why"), cells, left=4))
    if lost:
        why = [(_breakable(row.name), row.reason) for row in lost[:_REJECTED]]
        parts.append(_table("Rejected", ("plan", "why"), why, left=2))
        if len(lost) > _REJECTED:
            parts.append(Text(f"and {len(lost) - _REJECTED} more in evidence.json", style="dim"))
    parts += [Text(note, style="yellow") for note in tune_text.remarks(record)]
    parts += [Text(said) for said in (tune_text.verification_sentence(record),) if said]
    parts += [Text(f"The plan: {record['plan']}"), Text(tune_text.interval_note(record), style="dim")]
    return Group(*parts, Text(text.where(record), style="dim"))


def _breakable(name: str) -> str:
    """A plan's line that may wrap between its parts."""
    return name.replace("+", " +")


def _table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str] | None = None,
    left: int = 1,
) -> Table:
    """A table whose first ``left`` columns hold words, which may wrap, and whose others hold numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title, title_justify="left", title_style="bold cyan", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )  # fmt: skip
    for index, name in enumerate(header):
        words = index < left
        table.add_column(
            Text(name), justify="left" if words else "right", overflow="fold", min_width=12 if name == "plan" else None, no_wrap=not words
        )  # fmt: skip
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style=styles[number] or None if styles else None)
    return table
