"""Show the result of a gradient parity test in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from castwise.report import words
from castwise.report.grids import Columns, Grid, Line


def lines(record: Mapping[str, Any]) -> list[Grid | Line]:
    """Return a plan's verdict and its worst modules, for the terminal."""

    def two_digits(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda module: "" if module[key] is None else f"{module[key]:.2g}"

    names = {"bias": "bias", "noise": "noise", "data's noise": "data_noise", "in Adam's steps": "adam"}
    columns: Columns = {"module": lambda module: module["path"] or "(model)"} | {
        name: two_digits(key) for name, key in names.items()
    }
    grid = Grid.of("", record["modules"], columns)
    answer = f"{record['words']}: {record['verdict']}. {record['reason']}"
    note = [Line(record[key]) for key in ("next", "note") if record[key]]
    made: list[Grid | Line] = [choices(record["choices"]), Line()] if record["choices"] else []
    return [Line(answer), *note, Line(), grid, Line(), *made, Line(f"Damage is {words.MEANING}.")]


def choices(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Return a table of the integers and booleans that differ between two formats, by module and operator."""
    columns: Columns = {
        "module": lambda row: row["path"] or "(model)",
        "choice": "what",
        "compared": lambda row: f"{row['elements']:,}",
        "differ": lambda row: f"{row['share']:.2%}",
        "not by rounding": lambda row: f"{row['wrong'] / row['elements']:.2%}",
    }
    return Grid.of("Choices that differ", rows, columns, lambda row: "stopped" if row["is_wrong"] else "")
