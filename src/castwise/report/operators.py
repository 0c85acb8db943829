"""Show which operators ran in which format, and which casts were made, in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from castwise.report import words
from castwise.report.grids import Columns, Grid, Line, opening
from castwise.report.plots import Picture

Record = Mapping[str, Any]

PICTURES: Mapping[str, Picture] = {}
_MOST = 10
"""Largest number of rows of a table in the terminal."""


def headline(record: Record) -> str:
    """Say what share of the time is spent in each format, and how much time casts take."""
    total = record["time_s"] or 1.0
    calls = sum(use["calls"] for use in record["operators"])
    by_format: dict[str, float] = {}
    for use in record["operators"]:
        by_format[use["format"]] = by_format.get(use["format"], 0.0) + use["time_s"]
    most = sorted(by_format.items(), key=lambda pair: -pair[1])[:3]
    shares = words.listed([f"{_share(time, total)} in {name}" for name, time in most])
    casts, rank = record["casts"], record.get("rank")
    plan = record["words"]
    if rank is not None:
        plan = f"{plan}, on rank {rank}, the slowest of {len(record['ranks_time_s'])}"
    if not casts:
        return f"{plan}: {calls:,} operators, {shares} by time; nothing is cast."
    avoidable = [cast for cast in casts if cast["avoidable"]]
    count, size = sum(c["calls"] for c in casts), words.size(record["cast_bytes"])
    said = (
        f"{plan}: {calls:,} operators, {shares} by time; {count:,} casts move {size} and take "
        f"{_share(sum(c['time_s'] for c in casts), total)} of the time"
    )
    if not avoidable:
        return f"{said}; each is needed."
    few = sum(c["calls"] for c in avoidable)
    return f"{said}; {few:,} of them, {words.size(sum(c['bytes'] for c in avoidable))}, could be avoided."


def grids(record: Record, most: int | None = None) -> list[Grid]:
    """Return tables of operators, casts and modules, each with at most ``most`` rows."""
    total = record["time_s"] or 1.0
    operators: Columns = {
        "operator": "operator",
        "format": "format",
        "phase": "phase",
        "calls": lambda use: f"{use['calls']:,}",
        "time": lambda use: words.time(use["time_s"]),
        "share": lambda use: _share(use["time_s"], total),
    }
    casts: Columns = {
        "module": lambda cast: cast["module"] or "(model, loss)",
        "cast": lambda cast: f"{cast['before']} to {cast['after']}",
        "phase": "phase",
        "calls": lambda cast: f"{cast['calls']:,}",
        "bytes": lambda cast: words.size(cast["bytes"]),
        "time": lambda cast: words.time(cast["time_s"]),
        "where": _where,
    }
    regions: Columns = {
        "region": lambda use: use["path"] or "(model, loss)",
        "operators": lambda use: f"{use['calls']:,}",
        "formats": lambda use: ", ".join(f"{count} {name}" for name, count in use["formats"].items()),
        "time": lambda use: words.time(use["time_s"]),
        "casts": lambda use: f"{use['casts']:,}",
        "bytes cast": lambda use: words.size(use["cast_bytes"]),
        "avoidable": lambda use: words.size(use["avoidable_bytes"]) if use["avoidable_bytes"] else "-",
    }
    out = [Grid.of("Operators", record["operators"][:most], operators)]
    if record["casts"]:
        status = lambda cast: "avoid" if cast["avoidable"] else ""  # noqa: E731 - as the columns are said
        out.append(Grid.of("Casts", record["casts"][:most], casts, status, spare=("time",)))
    by_time = sorted(record["regions"], key=lambda use: -use["time_s"])
    out.append(
        Grid.of("Regions", by_time[:most] if most else record["regions"], regions, spare=("operators",))
    )
    return out


def lines(record: Record) -> list[Grid | Line]:
    """Return the tables for the terminal, with the rows that take the most time."""
    shown: list[Grid | Line] = [Line(record["answer"], "bold")]
    for grid in grids(record, _MOST):
        shown += [Line(), grid]
    left = max(len(record[key]) - _MOST for key in ("operators", "casts", "regions"))
    more = [Line(f"Tables show {_MOST} rows; save() writes all of them.", "dim")] if left > 0 else []
    return [*shown, *more, *(Line(note, "yellow") for note in record["notes"])]


def brief(record: Record) -> list[Grid | Line]:
    """Return only the answer, without the tables."""
    return opening(lines(record))


def values(record: Record) -> dict[str, Any]:
    """Return the values for the page's template, by name."""
    return {"answer": record["answer"], "grids": grids(record), "notes": record["notes"]}


def _where(cast: Record) -> str:
    """Say where a cast is made, and why it could be avoided."""
    where = cast["source"].replace(", line ", ":")
    if cast["avoidable"] == "repeated":
        return f"was cast before in {cast['first'] or 'the model'}; {where}"
    if cast["avoidable"] == "round trip":
        return f"undoes a cast; {where}"
    return str(where)


def _share(part: float, whole: float) -> str:
    return words.percent(part / whole)
