"""Show what a monitor recorded of a training: its alarms, the last sample of each module, and its audits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from castwise.core.plans.text import some
from castwise.report import words
from castwise.report.grids import Columns, Grid, Line, Row
from castwise.report.plots import COLOURS, Picture, Record, name_decades, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 12
"""Largest number of modules in the terminal: those with the largest updates."""
_COLUMNS = {
    "gradient": "grad_norm", "weights": "weight_norm", "update": "update_ratio", "output": "output",
    "near overflow": "near_overflow", "zero": "zero", "subnormal": "subnormal", "underflow": "underflow",
    "lost": "lost_updates",
}  # fmt: skip
COLUMNS = {
    "gradient, weights": "norms; the gradients are measured before the step and without the loss scale",
    "update": "the norm of the change of the weights in the step, divided by the norm of the weights",
    "output": "the largest magnitude that the module returned",
    "near overflow": "share of its fp16 outputs above an eighth of 65504",
    "zero, subnormal": "shares of the gradients of its fp16 outputs that are 0 or subnormal in fp16",
    "underflow": "squared error of rounding to subnormals, divided by the squared norm of the gradients",
    "lost": "share of the updates that rounding dropped, where parameters are stored low without masters",
}
"""What each column means, for the page."""
_SHARES = ("near_overflow", "zero", "subnormal", "lost_updates")


def lines(record: Mapping[str, Any]) -> list[Grid | Line]:
    """Return the lines for the terminal: the run in one sentence, open alarms, the last sample by module, the last audit."""
    out: list[Grid | Line] = [Line(answer(record))]
    still = [alarm for alarm in record["alarms"] if alarm["open"]]
    out += [
        Line(f"ALARM {alarm['kind']} at step {alarm['step']}: {alarm['message']}", "bold red")
        for alarm in still
    ]
    regions = region_grid(record, ROWS)
    if regions.rows:
        out += [Line(), Line(last(record), "bold"), dataclasses.replace(regions, title="")]
    if record["audits"]:
        audit = record["audits"][-1]
        out += [Line(), Line(f"Audit at step {audit['step']}: {audit['verdict']}; {audit['reason']}")]
    return out + [Line(f"Not seen: {what}", "dim") for what in record["unseen"]]


def answer(record: Mapping[str, Any]) -> str:
    """Describe the run in one sentence."""
    count = sum(alarm["open"] for alarm in record["alarms"])
    alarms = "no alarm open" if not count else f"{count} alarm{'s' if count > 1 else ''} open"
    if cleared := len(record["alarms"]) - count:
        alarms += f", {cleared} cleared"
    restored = [name for name, _ in record["restored_buffers"]]
    put_back = f"buffers restored after skipped steps: {some(restored)}; " if restored else ""
    return (
        f"{record['words']}: {record['steps']} steps, {record['skipped_steps']} skipped, {put_back}{alarms}"
    )


def last(record: Mapping[str, Any]) -> str:
    """Describe the last sample in one line; empty before the first sample."""
    if not record["samples"]:
        return ""
    sample = record["samples"][-1]
    names = {"grad_norm": "gradient norm", "update_ratio": "update", "loss_scale": "loss scale"}
    known = [
        f"{what} {'not finite' if sample[name] is None else number(sample[name])}"
        for name, what in names.items()
        if sample[name] is not None or name in sample["not_finite"]
    ]
    return f"Step {sample['step']}" + (f": {', '.join(known)}" if known else "")


def number(value: float | None) -> str:
    """Format a number to three digits."""
    return "-" if value is None else f"{value:.3g}"


def _cell(name: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(region: Mapping[str, Any]) -> str:
        value = region[name]
        if value is None:
            return "not finite" if name in region["not_finite"] else "-"
        return words.percent(value).replace("less than ", "<") if name in _SHARES else number(value)

    return cell


def region_grid(record: Mapping[str, Any], most: int | None = None) -> Grid:
    """Return a table of the last sample with a row for each module, largest updates first, without empty columns."""
    if not record["samples"]:
        return Grid("", ("module",), ())
    sample = record["samples"][-1]
    named = {alarm["region"] for alarm in record["alarms"] if alarm["open"]}
    rows = sorted(sample["regions"], key=lambda r: (r["path"] not in named, -(r["update_ratio"] or 0.0)))
    left = max(0, len(rows) - most) if most else 0
    known = {
        name: _cell(field)
        for name, field in _COLUMNS.items()
        if any(r[field] is not None or field in r["not_finite"] for r in rows)
    }
    columns: Columns = {"module": lambda r: r["path"] or "(model)"} | known
    grid = Grid.of(last(record), rows[:most], columns, spare=("weights", "zero", "subnormal"))
    if left:
        more = Row((f"and {left} more", *("" for _ in known)))
        grid = dataclasses.replace(grid, rows=(*grid.rows, more))
    return grid


def alarm_grid(record: Mapping[str, Any]) -> Grid:
    """Return a table of all alarms."""
    columns: Columns = {
        "alarm": "kind", "step": "step", "module": lambda a: a["region"] or "(model)",
        "value": lambda a: number(a["value"]), "line": lambda a: number(a["line"]),
        "state": lambda a: "open" if a["open"] else "was cleared", "why": "message",
    }  # fmt: skip
    return Grid.of("Alarms", record["alarms"], columns)


def audit_grid(record: Mapping[str, Any]) -> Grid:
    """Return a table of all audits."""
    columns: Columns = {
        "step": lambda a: str(a["step"]), "verdict": "verdict", "damage": lambda a: number(a["damage"]),
        "in Adam's steps": lambda a: number(a["adam"]), "microbatches": "microbatches", "why": "reason",
    }  # fmt: skip
    return Grid.of("Audits", record["audits"], columns)


def values(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for the page's template, by name. The page shows the whole run."""
    return {
        "answer": answer(record), "regions": region_grid(record), "alarms": alarm_grid(record),
        "audits": audit_grid(record), "remarks": [f"Not seen: {what}" for what in record["unseen"]],
        "meaning": words.MEANING, "columns": COLUMNS,
    }  # fmt: skip


def _curve(field: str, title: str, colour: str, base: int = 10) -> Callable[[Record], Figure | None]:
    def draw(record: Record) -> Figure | None:
        seen = [(s["step"], s[field]) for s in record["samples"] if s["optimizer"] == 0 and s[field]]
        if len(seen) < 2:
            return None
        figure = new_figure(2.4)
        axes = figure.subplots()
        axes.plot(*zip(*seen, strict=True), color=colour, lw=1.8, marker="." if len(seen) < 40 else "")
        for alarm in record["alarms"]:
            axes.axvline(alarm["step"], color=COLOURS[6], lw=1.0, ls=":")
        axes.set_yscale("log", base=base)
        if base == 10:
            name_decades(axes, [value for _, value in seen])
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(visible=True)
        return figure

    return draw


PICTURES = {
    "gradient": Picture(
        _curve("grad_norm", "Gradient norm", COLOURS[0]), "The norm of all gradients by step",
        "The norm of all gradients, unscaled. Dotted: alarms.",
    ),
    "update": Picture(
        _curve("update_ratio", "Update", COLOURS[1]), "Update norm divided by weight norm, by step",
        "The norm of the update, divided by the norm of the weights.",
    ),
    "scale": Picture(
        _curve("loss_scale", "Loss scale", COLOURS[2], 2), "The loss scale by step", "The loss scale.",
    ),
}  # fmt: skip
