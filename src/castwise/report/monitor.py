"""What a monitor saw of a training: alarms, the last sample by region, audits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from castwise.report.grids import Columns, Grid, Line, Row

ROWS = 12
"""Regions in the terminal: those with the largest updates."""
_COLUMNS = {
    "gradient": "grad_norm", "weights": "weight_norm", "update": "update_ratio", "output": "output",
    "near overflow": "near_overflow", "zero": "zero", "subnormal": "subnormal", "underflow": "underflow",
    "lost": "lost_updates",
}  # fmt: skip
_SHARES = ("near_overflow", "zero", "subnormal", "lost_updates")


def lines(record: Mapping[str, Any]) -> list[Grid | Line]:
    """The run in a line, open alarms, the last sample's regions and the last audit, for the terminal."""
    out: list[Grid | Line] = [Line(answer(record))]
    still = [alarm for alarm in record["alarms"] if alarm["open"]]
    out += [
        Line(f"ALARM {alarm['kind']} at step {alarm['step']}: {alarm['message']}", "bold red")
        for alarm in still
    ]
    regions = region_grid(record, ROWS)
    if regions.rows:
        out += [Line(), regions]
    if record["audits"]:
        last = record["audits"][-1]
        out += [Line(), Line(f"Audit at step {last['step']}: {last['verdict']}; {last['reason']}")]
    return out + [Line(f"Not seen: {what}", "dim") for what in record["unseen"]]


def answer(record: Mapping[str, Any]) -> str:
    """The run in a sentence."""
    said = f"{record['plan']}: {record['steps']} steps, {record['skipped_steps']} skipped"
    sample = record["samples"][-1] if record["samples"] else None
    if sample is not None:
        for name, what in (
            ("grad_norm", "gradient norm"),
            ("update_ratio", "update"),
            ("loss_scale", "loss scale"),
        ):
            if sample[name] is not None:
                said += f", {what} {number(sample[name])}"
    count = sum(alarm["open"] for alarm in record["alarms"])
    return said + (f"; {count} alarm{'s' if count > 1 else ''} open" if count else "; no alarm open")


def number(value: float | None) -> str:
    """Three digits."""
    return "-" if value is None else f"{value:.3g}"


def _cell(name: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(region: Mapping[str, Any]) -> str:
        value = region[name]
        return "-" if value is None else f"{value:.1%}" if name in _SHARES else f"{value:.3g}"

    return cell


def region_grid(record: Mapping[str, Any], most: int | None = None) -> Grid:
    """The last sample by region, largest updates first, without columns that say nothing."""
    if not record["samples"]:
        return Grid("", ("module",), ())
    sample = record["samples"][-1]
    named = {alarm["region"] for alarm in record["alarms"] if alarm["open"]}
    rows = sorted(sample["regions"], key=lambda r: (r["path"] not in named, -(r["update_ratio"] or 0.0)))
    left = max(0, len(rows) - most) if most else 0
    known = {
        name: _cell(field) for name, field in _COLUMNS.items() if any(r[field] is not None for r in rows)
    }
    columns: Columns = {"module": lambda r: r["path"] or "(model)"} | known
    grid = Grid.of(f"Step {sample['step']}", rows[:most], columns)
    if left:
        more = Row((f"and {left} more", *("" for _ in known)))
        grid = Grid(grid.title, grid.header, (*grid.rows, more))
    return grid


def alarm_grid(record: Mapping[str, Any]) -> Grid:
    """All alarms."""
    columns: Columns = {
        "alarm": "kind", "step": "step", "module": lambda a: a["region"] or "(model)",
        "value": lambda a: number(a["value"]), "line": lambda a: number(a["line"]),
        "state": lambda a: "open" if a["open"] else "was cleared", "why": "message",
    }  # fmt: skip
    return Grid.of("Alarms", record["alarms"], columns)


def audit_grid(record: Mapping[str, Any]) -> Grid:
    """All audits."""
    columns: Columns = {
        "step": lambda a: str(a["step"]), "verdict": "verdict", "damage": lambda a: number(a["damage"]),
        "in Adam's steps": lambda a: number(a["adam"]), "microbatches": "microbatches", "why": "reason",
    }  # fmt: skip
    return Grid.of("Audits", record["audits"], columns)
