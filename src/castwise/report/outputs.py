"""Show in the terminal how a served model's outputs under a plan differ from those in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from castwise.report.grids import Columns, Grid, Line, Said

_MEANING = (
    "Errors are norms of differences from fp32's outputs, divided by the norm of fp32's. The floor is the error in fp32 when the "
    "weights and inputs are rounded at random to the plan's format."
)

_SAID = {"pass": "passes", "fail": "fails", "undecided": "is undecided"}
_OPTIONAL = (
    ("unexplained", "unexplained", ".2%"),
    ("top-5 changed", "top5_changed", ".2%"),
    ("KL", "divergence", ".2g"),
    ("KL, 99 %", "divergence_p99", ".2g"),
    ("rank correlation", "rank", ".5f"),
)
"""Columns that are shown if they are known: their names, keys and number formats."""


def lines(record: Mapping[str, Any]) -> list[Grid | Line]:
    """Return a plan's verdict, its outputs and its metrics."""

    def number(key: str, form: str = ".2g") -> Callable[[Mapping[str, Any]], str | None]:
        return lambda row: None if row[key] is None else format(row[key], form)

    columns: dict[str, Said] = {
        "output": "name",
        "kind": "kind",
        "error": number("error"),
        "floor": number("floor"),
        "times floor": number("times"),
        "changed": number("changed", ".2%"),
        "by rounding": number("changed_by_rounding", ".2%"),
        "verdict": "verdict",
    }
    rows = record["outputs"]
    for name, key, form in _OPTIONAL:
        if any(row[key] is not None for row in rows):
            columns[name] = number(key, form)
    spare = ("KL, 99 %", "KL", "top-5 changed", "by rounding")
    grid = Grid.of("", rows, columns, lambda row: "failed" if row["verdict"] == "fail" else "", spare=spare)
    samples = f"{record['batches']} batches, {record['samples']:,} samples."
    made: list[Grid | Line] = []
    if record["metrics"]:
        metrics: Columns = {
            "metric": "name",
            "fp32": number("fp32", ".4g"),
            "plan": number("plan", ".4g"),
            "rounding": number("noise"),
            "explained": lambda row: "yes" if row["explained"] else "no",
        }
        made = [Grid.of("Metrics", record["metrics"], metrics), Line()]
    note = [Line(record["note"])] if record["note"] else []
    return [
        Line(f"{record['words']} {_SAID[record['verdict']]}: {record['reason']}."),
        *note,
        Line(),
        grid,
        Line(),
        *made,
        Line(f"{samples} {_MEANING}"),
    ]
