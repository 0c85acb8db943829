"""Show in the terminal how a script ran under several plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castwise.report import words
from castwise.report.grids import Columns, Grid, Line

Record = Mapping[str, Any]


def headline(record: Record) -> str:
    """Say in one sentence under which plan the script ran fastest."""
    rows = record["plans"]
    first, ran = rows[0], [row for row in rows if row["status"] == "ok"]
    if first not in ran:
        return f"{record['script']} did not run under {first['words']}, so nothing can be compared with it."
    if len(rows) == 1:
        return f"{record['script']} runs under {first['words']}; give --plans more than one plan to compare them."
    known = [row for row in ran if row["speedup"] is not None and row["speedup"]["low"] > 1.0]
    if not known:
        others = "no other plan that ran is" if len(ran) > 1 else "no other plan ran, so none is"
        return f"{record['script']}: {others} known to be faster than {first['words']}."
    best = max(known, key=lambda row: float(row["speedup"]["value"]))
    return f"{record['script']} runs {words.speed(best['speedup'])} as fast under {best['words']} as under {first['words']}."


def brief(record: Record) -> list[Grid | Line]:
    """Return the answer, a row per plan and the failures, for one screen."""
    grid = _grid(record)
    failed = [f"{row['words']} failed: {row['reason']}" for row in record["plans"] if row["reason"]]
    return [
        Line(headline(record), "bold"),
        grid.only(grid.title, *(name for name in grid.header if name != "skipped")),
        *(Line(said, "yellow") for said in failed[:_MOST]),
        *_tuned(record),
        Line("Brackets hold 95 % intervals. --verbose adds notes and the method.", "dim"),
    ]


_MOST = 2
"""Largest number of failures that are explained on one screen. The table shows all of them."""


def lines(record: Record) -> list[Grid | Line]:
    """Return the answer, a table with a row per plan, the failures, and what the numbers mean, for the terminal."""
    rows = record["plans"]
    process = ", of the whole process" if record["environment"]["device_type"] == "cpu" else ""
    return [
        Line(headline(record), "bold"),
        _grid(record),
        *(Line(f"{row['words']} failed: {row['reason']}", "yellow") for row in rows if row["reason"]),
        *(Line(f"{row['words']}: {note}") for row in rows for note in row["notes"]),
        *_tuned(record),
        Line(
            f"Times are medians ± half the interquartile range of {record['rounds']} rounds, including everything that the "
            f"script does between two steps; each plan ran in its own process, one at a time. Brackets hold 95 % intervals "
            f"from paired rounds of one start. Memory is the peak{process}.",
            "dim",
        ),
        Line(words.where(record), "dim"),
    ]


def _tuned(record: Record) -> list[Line]:
    if not record["tuned"]:
        return []
    said = next((row["words"] for row in record["plans"] if row["plan"] == record["tuned"]), record["tuned"])
    return [Line(f"Tuned for this script: {said}. {record['answer']}", "bold")]


def _grid(record: Record) -> Grid:
    rows = record["plans"]
    first = rows[0]
    columns: Columns = {
        "plan": "words",
        "step": lambda row: words.step(row["step"]),
        f"vs {first['words']}": lambda row: "" if row is first else words.speed(row["speedup"]),
        "peak memory": lambda row: words.against(
            row["peak_bytes"], None if row is first else first["peak_bytes"]
        ),
        "loss": lambda row: words.loss(row["final_loss"]) if row["status"] == "ok" else "-",
        "skipped": "skipped",
    }
    return Grid.of(
        f"{record['script']}, its first {record['steps']} steps",
        rows,
        columns,
        "status",
        spare=("skipped", "peak memory"),
    )
