"""Numbers and answers in words, the same in the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from castwise.measure import stats

__all__ = [
    "BEHIND", "Grid", "baseline", "behind", "difference", "format_bytes", "format_factor", "format_loss", "format_time",
    "grids", "headline", "interval", "interval_note", "notes", "share", "where",
]  # fmt: skip

BEHIND = 0.1
"""A plan is not recommended if its final loss is above the baseline's by this part of what that one gained."""

Record = Mapping[str, Any]
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def format_time(seconds: float) -> str:
    """Seconds to three digits in the unit that suits them, as ``12.5 ms``."""
    unit, size = next((u for u in _UNITS if seconds >= u[1]), _UNITS[-1])
    return f"{_digits(seconds / size)} {unit}"


def format_bytes(count: float) -> str:
    """Bytes to three digits in powers of 1024, as ``7.46 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{_digits(count / size)} {unit}"
    return f"{count:.0f} B"


def format_factor(value: float) -> str:
    """A factor to three digits, as ``1.96x``."""
    return f"{_digits(value)}x"


def format_loss(value: float | None) -> str:
    """A loss to four digits; a loss that is not finite has no number in a record."""
    return "not finite" if value is None else f"{value:.4g}"


def _digits(value: float) -> str:
    if value <= 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(value) + 1e-9))
    return f"{value:.{min(places, 6)}f}"


def interval(ratio: Record) -> str:
    """A ratio's interval, as ``1.81 to 2.02``."""
    return f"{_digits(ratio['low'])} to {_digits(ratio['high'])}"


def is_tie(ratio: Record) -> bool:
    """Whether a ratio's interval contains 1."""
    return bool(ratio["low"] <= 1.0 <= ratio["high"])


def difference(row: Record, base: Record) -> str:
    """A plan's final loss against the baseline's, with sign and percentage."""
    delta, reference = row.get("final_loss_difference"), base.get("final_loss")
    if delta is None:
        return ""
    if delta == 0:
        return "the same"
    relative = f" ({delta / abs(reference):+.1%})" if reference else ""
    return f"{delta:+.3g}{relative}".replace("%", " %")


def share(value: float, reference: float) -> str:
    """How much less or more than a reference, as ``29 % less``."""
    change = value / reference - 1.0
    if abs(change) < 0.005:
        return "as much"
    return f"{abs(change) * 100:.0f} % {'less' if change < 0 else 'more'}"


def baseline(record: Record) -> Record:
    """The row that the others are compared with."""
    found: Record = next(row for row in record["plans"] if row["name"] == record["baseline"])
    return found


def behind(row: Record, base: Record) -> bool:
    """Whether a plan learned visibly less than the baseline in the same steps, or its loss is not finite."""
    if not row["losses"] or not base["losses"]:
        return False
    final, first, reference = row["losses"][-1], base["losses"][0], base["losses"][-1]
    if final is None or None in (first, reference):
        return reference is not None
    return bool(final - reference > BEHIND * max(first - reference, 0.0) and final > reference)


def headline(record: Record) -> str:
    """The answer that a person came for, in a few sentences computed from the numbers.

    A difference inside its interval is called a tie, and a plan that did not learn as well is never the answer.

    Returns:
        Plain text.
    """
    base = baseline(record)
    name, workload = base["name"], record["workload"]
    if base["status"] != "ok":
        return f"{name} did not finish on {workload}, so nothing can be compared with it: {base['reason']}."
    rows = [r for r in record["plans"] if r is not base and r["status"] == "ok" and _speedup(r) is not None]
    sound = [row for row in rows if not behind(row, base)]
    out = []
    if not rows:
        others = [row for row in record["plans"] if row is not base]
        out.append(f"On this machine no other plan than {name} could be measured on {workload}.")
        return " ".join(out + [f"{row['name']}: {row['reason']}." for row in others if row["reason"]])
    faster = sorted((r for r in sound if _speedup(r)["low"] > 1.0), key=lambda r: -_speedup(r)["value"])
    if faster:
        # Of those that the rounds do not tell from the fastest, the first that was asked for: on a second run the
        # fastest may be another, the answer should not.
        best = next(
            row for row in sound if row is faster[0] or (row in faster and _level_with(faster[0], row))
        )
        out.append(
            f"On this machine {best['name']} trains {workload} {format_factor(_speedup(best)['value'])} as fast as "
            f"{name} ({_level(best)} interval {interval(_speedup(best))}){_memory_words(best, base)}; "
            f"{_loss_words(best, base)}."
        )
        ties = [row["name"] for row in faster if row is not best and _level_with(best, row)]
        if ties:
            out.append(f"The measurement does not tell it apart from {_and(ties)} in speed.")
    else:
        close = max(sound or rows, key=lambda r: _speedup(r)["value"])
        speed = _speedup(close)
        if is_tie(speed):
            said = f"{close['name']} and {name} are a tie: {format_factor(speed['value'])} as fast"
        else:
            said = f"{close['name']} comes closest: {format_factor(speed['value'])} as fast"
        out.append(
            f"On this machine no plan that learns as well trains {workload} measurably faster than {name}. "
            f"{said} ({_level(close)} interval {interval(speed)}){_memory_words(close, base)}; "
            f"{_loss_words(close, base)}."
        )
    lagging = [row["name"] for row in rows if row not in sound]
    if lagging:
        out.append(f"{_and(lagging)} learned visibly less than {name} in the same steps.")
    return " ".join(out)


def _speedup(row: Record, stage: str = "training") -> Any:
    timing = row.get(stage)
    return timing["speedup"] if timing else None


def _level(row: Record) -> str:
    return f"{_speedup(row)['level'] * 100:.3g} %"


def _memory_words(row: Record, base: Record) -> str:
    mine = (row.get("memory") or {}).get("training_peak_bytes")
    other = (base.get("memory") or {}).get("training_peak_bytes")
    return f" with {share(mine, other)} peak memory" if mine and other else ""


def _loss_words(row: Record, base: Record) -> str:
    delta = row.get("final_loss_difference")
    if delta is None:
        return "its final loss is not finite"
    if delta == 0:
        return "its final loss is the same"
    reference = base["final_loss"]
    part = f", {abs(delta / reference) * 100:.2g} % of {base['name']}'s" if reference else ""
    return f"its final loss is {abs(delta):.2g} {'higher' if delta > 0 else 'lower'}{part}"


def _level_with(best: Record, row: Record) -> bool:
    """Whether two plans' own rounds do not tell which is faster."""
    pairs = [
        (a, b)
        for a, b in zip(row["training"]["rounds_s"], best["training"]["rounds_s"], strict=True)
        if a is not None and b is not None
    ]
    return bool(pairs) and stats.paired_speedup([a for a, _ in pairs], [b for _, b in pairs]).is_tie


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


@dataclass(frozen=True)
class Grid:
    """A table as plain text: a title, a header, and a row of cells per plan.

    Attributes:
        title: What it is about.
        header: Column names; the first column holds plans.
        rows: Cells, as many per row as the header has.
        dim: Numbers of the rows without results.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    dim: frozenset[int]


def grids(record: Record) -> list[Grid]:
    """A bench's results as small tables, each narrow enough for a terminal and a phone.

    Returns:
        Speed, memory where it was measured, and learning.
    """
    base = baseline(record)
    rows = record["plans"]
    dim = frozenset(index for index, row in enumerate(rows) if row["status"] != "ok")
    versus = f"vs {base['name']}"
    stages = ["training", *(["inference"] if any(row["inference"] for row in rows) else [])]
    speed = [(row["name"], *(c for stage in stages for c in _timed(row, stage))) for row in rows]
    header = (
        "plan",
        *(c for stage in stages for c in ("training step" if stage == "training" else "inference", versus)),
    )
    out = [Grid("Speed", header, tuple(speed), dim)]
    kinds = {
        "training peak": "training_peak_bytes",
        "inference peak": "inference_peak_bytes",
        "kept for backward": "saved_bytes",
    }
    kinds = {k: v for k, v in kinds.items() if any((row["memory"] or {}).get(v) is not None for row in rows)}
    if kinds:
        memory = [(row["name"], *(_held(row, base, key) for key in kinds.values())) for row in rows]
        out.append(Grid("Memory", ("plan", *kinds), tuple(memory), dim))
    metrics = sorted({key for row in rows for key in row["metrics"]})
    learning = []
    for row in rows:
        ok = row["status"] == "ok"
        loss = format_loss(row["final_loss"]) if ok else "-"
        delta = "" if row is base or not ok else difference(row, base)
        skipped = str(row["skipped_steps"]) if ok else "-"
        values = (f"{v:.4g}" if (v := row["metrics"].get(m)) is not None else "-" for m in metrics)
        learning.append((row["name"], loss, delta, skipped, *values))
    header = ("plan", "final loss", versus, "skipped steps", *metrics)
    out.append(Grid("Learning", header, tuple(learning), dim))
    return out


def _timed(row: Record, stage: str) -> tuple[str, str]:
    """Median and half the interquartile range; speed against the baseline with its interval."""
    timing = row[stage]
    if timing is None:
        if row["status"] == "ok" or stage != "training":
            return ("-", "")
        return (row["status"], row["reason"].removeprefix("stopped: ") if row["status"] == "stopped" else "")
    step, ratio = timing["step"], timing["speedup"]
    unit, size = next((u for u in _UNITS if step["median_s"] >= u[1]), _UNITS[-1])
    median = _digits(step["median_s"] / size)
    places = len(median.partition(".")[2])
    half = (step["q3_s"] - step["q1_s"]) / 2 / size
    if ratio is None:
        return (f"{median} ±{half:.{places}f} {unit}", "")
    ends = f"{_digits(ratio['low'])}-{_digits(ratio['high'])}"
    return (f"{median} ±{half:.{places}f} {unit}", f"{format_factor(ratio['value'])} ({ends})")


def _held(row: Record, base: Record, key: str) -> str:
    mine, other = ((r["memory"] or {}).get(key) for r in (row, base))
    if mine is None:
        return "-"
    change = f" ({mine / other - 1:+.0%})".replace("%", " %") if other and row is not base else ""
    return format_bytes(mine) + change


def interval_note(record: Record) -> str:
    """What the numbers in the speed table are."""
    levels = {t["speedup"]["level"] for r in record["plans"] for t in (r["training"],) if t and t["speedup"]}
    level = f"{min(levels, default=stats.LEVEL) * 100:.3g} %"
    return (
        f"Times are medians ± half the interquartile range of {record['rounds']} interleaved rounds, "
        f"{record['steps']} training steps in all; speeds come with their {level} interval from paired rounds. "
        "An interval that contains 1 is a tie."
    )


def where(record: Record) -> str:
    """The machine and the versions in a line."""
    env = record["environment"]
    castwise = f"castwise {env['castwise']}" + (f" at {env['commit']}" if env["commit"] else "")
    threads = f"{env['threads']} thread{'s' if env['threads'] != 1 else ''}"
    versions = f"torch {env['torch']}, Python {env['python']}, {castwise}"
    return f"{env['device']}, {threads}; {versions}; {env['date'][:10]}"


def notes(record: Record) -> list[str]:
    """Sentences below a table: why a plan has no numbers, and what else went wrong."""
    base = baseline(record)
    out = []
    for row in record["plans"]:
        if row["status"] in ("unsupported", "failed"):
            out.append(f"{row['name']}, {row['status']}: {row['reason']}")
        elif row["status"] == "stopped":
            out.append(f"{row['name']} was {row['reason']}.")
        elif behind(row, base):
            out.append(f"{row['name']} learned visibly less than {base['name']} in the same steps.")
        out += [f"{row['name']}: {note}" for note in row["notes"]]
    return out
