"""What a script did under several plans, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castwise.report import words
from castwise.report.grids import Columns, Grid, Line

Record = Mapping[str, Any]


def lines(record: Record) -> list[Grid | Line]:
    """A table with a row per plan, why one failed, and what the numbers are."""
    rows = record["plans"]
    first = rows[0]
    columns: Columns = {
        "plan": "plan",
        "step": lambda row: words.step(row["step"]),
        f"vs {first['plan']}": lambda row: "" if row is first else words.speed(row["speedup"]),
        "peak memory": lambda row: words.against(
            row["peak_bytes"], None if row is first else first["peak_bytes"]
        ),
        "loss": lambda row: words.loss(row["final_loss"]) if row["status"] == "ok" else "-",
        "skipped": "skipped",
    }
    process = ", of the whole process" if record["environment"]["device_type"] == "cpu" else ""
    return [
        Grid.of(f"{record['script']}, its first {record['steps']} steps", rows, columns, "status"),
        *(Line(f"{row['plan']} failed: {row['reason']}", "yellow") for row in rows if row["reason"]),
        *(
            Line(f"{row['plan']}: {note}", "yellow")
            for row in rows
            for note in row["notes"]
            if "trains under" not in note
        ),
        *(
            (Line(f"Tuned for this script: {record['tuned']}. {record['answer']}", "bold"),)
            if record["tuned"]
            else ()
        ),
        Line(
            f"Times are medians ± half the interquartile range of {record['rounds']} rounds, with all that the script does between "
            f"two steps; each plan ran in a process of its own, one at a time. Brackets hold 95 % intervals from paired rounds of "
            f"this one start. Memory is the most at any time{process}.",
            "dim",
        ),
        Line(words.where(record), "dim"),
    ]
