"""Show the result of ``castwise doctor`` in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from castwise.report import words
from castwise.report.grids import Columns, Grid, Line

Record = Mapping[str, Any]


def lines(record: Record) -> list[Grid | Line]:
    """Return what was measured on a device, for the terminal. A workload, if one was given, comes first."""
    where, band = record["environment"], record["bandwidth"]
    quartiles = f"{band['gb_per_s_low']:.3g} to {band['gb_per_s_high']:.3g}"
    return [
        *(_workload(record["workload"]) if record["workload"] is not None else ()),
        Line(
            f"{where['device']} ({where['device_type']}, {where['threads']} threads, torch {where['torch']})",
            "bold",
        ),
        Line(f"Matrix units: {record['units']['sentence']}"),
        *_features(where["device_type"], record["features"]),
        Line(f"Memory: {band['gb_per_s']:.3g} GB/s (quartiles {quartiles})"),
        Line(),
        _rates(record["rates"]),
        _grades(record["grades"]),
        *([Line(_ALONE, "dim")] if record["workload"] is None else ()),
        *(Line(note, "yellow") for note in record["notes"]),
    ]


def brief(record: Record) -> list[Grid | Line]:
    """Return the answer for one screen: with a workload, its steps by plan and its limits, else the formats of the device."""
    where, report = record["environment"], record["workload"]
    device = Line(f"{where['device']}, {where['threads']} threads: {record['units']['sentence']}.", "dim")
    hint = Line("--verbose shows the rates of each operator, and how they were measured.", "dim")
    if report is None:
        told: list[Grid | Line] = [
            Line(_device_headline(record), "bold"), replace(_grades(record["grades"]), title=""),
            Line("These are single operators; castwise doctor WORKLOAD times training steps."),
        ]  # fmt: skip
    else:
        told = [
            Line(headline(report), "bold"),
            _steps(report).only("", "plan", "training step", "vs fp32", "grade"),
        ]
        for bottleneck in report["bottlenecks"][:_MOST]:
            told += [Line(f"- {bottleneck['sentence']}", "yellow"), Line(f"  {bottleneck['advice']}")]
    lacks = _features(where["device_type"], record["features"]) if record["features"]["lacks"] else []
    return [*told, *(Line(note, "yellow") for note in record["notes"]), device, *lacks, hint]


_MOST = 2
"""Largest number of bottlenecks that are shown on one screen. The first have the largest effect."""


def _features(kind: str, found: Record) -> list[Line]:
    """Say what torch has for an accelerator. Of a CPU, torch has all that castwise uses."""
    if kind == "cpu":
        return []
    number = f"{found['count']} {kind} device" + "s" * (found["count"] != 1)
    lacks = f"; it lacks {words.listed(found['lacks'])}" if found["lacks"] else ""
    return [
        Line(f"For {number} torch has {words.listed(found['has']) or 'nothing that castwise uses'}{lacks}.")
    ]


def _device_headline(record: Record) -> str:
    """Say in one sentence for which formats operators are faster on this device, and which formats to avoid."""
    by: dict[str, list[str]] = {}
    for found in record["grades"]:
        by.setdefault(found["grade"], []).append(found["format"])
    fast, avoid = by.get("fast", []), by.get("avoid", [])
    said = (
        f"operators in {words.listed(fast)} are faster than in fp32"
        if fast
        else "no low format is known to be faster than fp32"
    )
    return f"On this device {said}{f'; avoid {words.listed(avoid)}' if avoid else ''}."


_ALONE = (
    "These are single operators. How much a training step gains from a format depends on its other operators and its sizes: "
    "castwise doctor WORKLOAD times the steps."
)


def _rates(rates: list[Record]) -> Grid:
    firsts = {rate["kernel"]: rate for rate in reversed(rates)}

    def ratio(rate: Record) -> str:
        speed = rate["speedup"]
        if speed is None:
            return ""
        return words.factor(speed["value"]) if speed["low"] == speed["high"] else str(words.speed(speed))

    def rated(rate: Record) -> str | None:
        ends = [rate["gflops_low"], rate["gflops_high"]]
        quartiles = "" if None in ends else " ({:,.3g} to {:,.3g})".format(*ends)
        return None if rate["gflops"] is None else f"{rate['gflops']:,.3g}{quartiles}"

    columns: Columns = {
        "operator": lambda rate: rate["kernel"] if firsts[rate["kernel"]] is rate else "",
        "format": "format",
        "GFLOP/s": rated,
        "ratio": ratio,
        "grade": lambda rate: rate["error"] or (rate["grade"] or "") + ", small probe" * rate["probe"],
    }
    title = "Single operators: GFLOP/s (quartiles), ratio to fp32 (95 % interval)"
    return Grid.of(title, rates, columns, lambda rate: "avoid" if rate["grade"] == "avoid" else "")


def _grades(grades: list[Record]) -> Grid:
    def graded(said: Record) -> Any:
        return said["grade"] + (f", not in {words.listed(said['avoid_in'])}" if said["avoid_in"] else "")

    columns: Columns = {"format": "format", "grade": graded, "why": "reason"}
    return Grid.of("Single operators by format", grades, columns, "grade")


def headline(report: Record) -> str:
    """Say in one sentence which plan trains a workload fastest."""
    fast = [step for step in report["steps"] if step["grade"] == "fast"]
    if not fast:
        return f"{report['name']}: no low format is known to make a training step faster here; stay in fp32."
    best = max(fast, key=lambda step: float(step["speedup"]["value"]))
    return f"{report['name']}: {best['plan']} trains {words.speed(best['speedup'])} as fast as fp32."


def _steps(report: Record) -> Grid:
    columns: Columns = {
        "plan": "plan",
        "training step": lambda step: words.step(step["time"]),
        "vs fp32": lambda step: "1" if step["grade"] is None else words.speed(step["speedup"]),
        "grade": "grade",
        "why": "reason",
    }
    return Grid.of(f"Steps of {report['name']}", report["steps"], columns, "grade")


def _workload(report: Record) -> list[Grid | Line]:
    profile = report["profile"]
    median, low, high = (words.time(profile["step_s"][key]) for key in ("median_s", "q1_s", "q3_s"))
    lines: list[Grid | Line] = [
        Line(headline(report), "bold"),
        Line(),
        _steps(report),
        Line(
            "Each plan trained in its own process, in turns, with several starts; brackets hold 95 % intervals from paired "
            "rounds. "
            f"{words.PAIRED} fast: the whole interval is above 1; avoid: the whole interval is below 0.9. castwise tune tests whether "
            f"a format preserves the gradients, and finds the fastest plan.",
            "dim",
        ),
        Line(),
        Line(f"What limits {report['name']} in fp32", "bold cyan"),
        Line(
            f"Measured alone, a training step takes {median} (quartiles {low} to {high}) and loading a batch takes "
            f"{words.time(profile['data_s']['median_s'])}. A step runs {profile['launches']:.0f} operators; "
            f"{1 - profile['outside_share']:.0%} of their time is in matrix products and convolutions."
        ),
    ]
    for bottleneck in report["bottlenecks"]:
        lines += [Line(f"- {bottleneck['sentence']}", "yellow"), Line(f"  {bottleneck['advice']}")]
    if not report["bottlenecks"]:
        lines.append(Line("Nothing stands out: matrix products take most of the time."))
    return [*lines, Line()]
