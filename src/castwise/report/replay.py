"""Show the result of running a recorded step again, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castwise.report.grids import Columns, Grid, Line


def lines(record: Mapping[str, Any]) -> list[Grid | Line]:
    """Return the losses and gradients of the record and of the new run, and why the step was recorded."""
    now, then = record["losses"], record["recorded_losses"]
    rows = [
        {
            "loss": at,
            "rank": record["ranks"][at] if at < len(then) else None,
            "then": then[at] if at < len(then) else None,
            "now": now[at] if at < len(now) else None,
        }
        for at in range(max(len(now), len(then)))
    ]
    of_ranks: Columns = {"rank": "rank"} if record["world_size"] > 1 else {}
    columns: Columns = {
        **of_ranks,
        "loss": "loss",
        "recorded": lambda row: _said(row["then"]),
        "now": lambda row: _said(row["now"]),
    }
    bad = record["nonfinite"]
    gradients = (
        f"not finite in {len(bad)} parameters: {', '.join(bad[:5])}{', ...' * (len(bad) > 5)}"
        if bad
        else "finite"
    )
    return [
        Line(headline(record), "bold"),
        *(Line(f"- {note}", "yellow") for note in record["notes"]),
        Line(),
        Grid.of("", rows, columns),
        Line(f"Gradients: {gradients}."),
        *([Line(record["first"]["answer"], "bold")] if record["first"] else []),
    ]


def headline(record: Mapping[str, Any]) -> str:
    """Say in one sentence whether the new run gives the recorded result."""
    what = f"Step {record['step']} ({record['reason']})"
    if record["exact"]:
        return f"{what}, repeated under {record['words']}: bit-identical."
    if record["exact"] is False:
        return f"{what}, repeated under {record['words']}: the result differs from the record."
    end = "finite" if record["finite"] else "not finite"
    return f"{what} of {record['recorded_words']}, repeated under {record['words']}: {end}."


def _said(value: float | str | None) -> str | None:
    return value if value is None or isinstance(value, str) else f"{value:.6g}"
