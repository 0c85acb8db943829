"""Show what a recovery did, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castwise.core.plans.text import some
from castwise.report.grids import Columns, Grid, Line


def lines(record: Mapping[str, Any]) -> list[Grid | Line]:
    """Return a table of all returns to a good state: when, why, and what was changed."""
    columns: Columns = {
        "step": "step", "continued at": "to_step", "what was seen": "symptom", "cause": "cause", "evidence": "evidence",
        "what was done": "action",
    }  # fmt: skip
    returns = record["returns"]
    grid: list[Grid | Line] = [Line(), Grid.of("", returns, columns)] if returns else []
    return [Line(headline(record), "bold"), *grid]


def headline(record: Mapping[str, Any]) -> str:
    """Say in one sentence how many returns were made, how many steps were skipped, and what the plan is now."""
    data = sum(one["to_step"] > one["step"] for one in record["returns"])
    count = len(record["returns"]) - data
    times = "never" if not count else "once" if count == 1 else f"{count} times"
    changed = "" if record["plan"] == record["first_plan"] else f"; the plan is {record['words']} now"
    skipped = f"; skipped {data} step{'s' * (data > 1)} with non-finite data" if data else ""
    put_back = record["restored_buffers"]
    restored = f"; restored after skipped steps: {some([*put_back])}" if put_back else ""
    return f"{record['steps']} steps; went back to a good state {times}{skipped}{changed}{restored}."
