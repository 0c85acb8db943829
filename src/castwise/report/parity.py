"""Show a parity test's result in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from castwise.report import words
from castwise.report.grids import Columns, Grid, Line


def lines(record: Mapping[str, Any]) -> list[Grid | Line]:
    """A plan's verdict and the worst modules, for the terminal."""

    def two_digits(key: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda module: "" if module[key] is None else f"{module[key]:.2g}"

    names = {"bias": "bias", "noise": "noise", "data's noise": "data_noise", "in Adam's steps": "adam"}
    columns: Columns = {"module": lambda module: module["path"] or "(model)"} | {
        name: two_digits(key) for name, key in names.items()
    }
    grid = Grid.of("", record["modules"], columns)
    answer = f"{record['words']}: {record['verdict']}. {record['reason']}"
    note = [Line(record[key]) for key in ("next", "note") if record[key]]
    return [Line(answer), *note, Line(), grid, Line(), Line(f"Damage is {words.MEANING}.")]
