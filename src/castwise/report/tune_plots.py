"""Plot the result of a search: magnitudes of gradients, speed against damage, and the damage of each region."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from castwise.core.plans.formats import FORMATS
from castwise.report import words
from castwise.report.plots import COLOURS, GREY, Picture, Record, name_rows, new_figure, row_height

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PALETTE = {"bf16": COLOURS[0], "fp16": COLOURS[1], "fp8_e5m2": COLOURS[4], "fp8_e4m3": COLOURS[3]}
_STATUS = {
    "chosen": (COLOURS[0], "*", 190.0),
    "sound": (COLOURS[2], "o", 42.0),
    "tie": (COLOURS[4], "o", 42.0),
    "rejected": (COLOURS[6], "X", 48.0),
    "baseline": (GREY, "s", 42.0),
}
REGIONS = 16
"""Largest number of regions in a plot: those with the largest gradients, or with the largest damage."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SLOWEST = 0.4
"""Plans that are slower than this fraction of fp32's speed are drawn at this speed, with a label."""
_LEAST = 1e-9
"""Smaller damage is drawn at this value."""


# --- speed against damage -----------------------------------------------------------------------------------


def _scatter(record: Record) -> Figure | None:
    rows = [r for r in record["candidates"] if r["parity"] and r["speedup"]]
    if not rows:
        return None
    passes, fails = record["lines"]["pass"], record["lines"]["fail"]
    known = [r["parity"]["value"] for r in rows if r["parity"]["value"] is not None]
    low = max(_LEAST, min([passes, *(v for v in known if v > 0)]) / 4)
    endless = any(r["parity"]["value"] is None for r in rows)
    high = max([10 * fails, *(4 * v for v in known)]) * (8 if endless else 1)
    figure = new_figure(3.9)
    axes = figure.subplots()
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    speeds = [max(r["speedup"]["value"], SLOWEST) for r in rows]
    ends = [r["speedup"] for r in rows]  # an interval may be infinite; the axis limits follow the points
    left = min(1.0, max(min(end["low"] for end in ends), 0.7 * min(speeds)))
    highs = [math.inf if end["high"] is None else end["high"] for end in ends]
    right = max(1.0, min(max(highs), 1.3 * max(speeds)))
    room = 0.12 * max(right - left, 0.1)
    axes.set_xlim(left - room, right + room)
    axes.axhspan(fails, high, color=COLOURS[6], alpha=0.10, lw=0)
    axes.axhspan(passes, fails, color=COLOURS[5], alpha=0.13, lw=0)
    axes.axvline(1.0, color=GREY, lw=1, ls=(0, (2, 2)))
    end = axes.get_xlim()[0]
    for value, word in ((fails, "fails above"), (passes, "passes below")):
        axes.axhline(value, color=GREY, lw=1)
        at = (end, value)
        axes.annotate(
            f"{word} {value:g}", at, xytext=(3, 2), textcoords="offset points", fontsize=8, va="bottom"
        )
    for status, (colour, marker, size) in _STATUS.items():
        mine = [r for r in rows if r["status"] == status]
        if not mine:
            continue
        x = [max(r["speedup"]["value"], SLOWEST) for r in mine]
        y = [
            high / 2 if r["parity"]["value"] is None else min(max(r["parity"]["value"], low), high)
            for r in mine
        ]
        axes.scatter(x, y, s=size, c=colour, marker=marker, label=status, zorder=3, linewidths=0)
        for r, at, value in zip(mine, x, y, strict=True):
            _error_bars(axes, r, at, value, low, high, colour)
    serves = record["goal"] == "inference"
    axes.set_title("Speed against error of outputs" if serves else "Speed against damage to gradients")
    axes.set_xlabel("speed over fp32")
    axes.set_ylabel("error relative to the floor" if serves else "damage: relative error of an update")
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, handletextpad=0.2, columnspacing=1.2)
    return figure


def _error_bars(axes: Axes, row: Record, x: float, y: float, low: float, high: float, colour: str) -> None:
    """Draw the intervals of a point, and a label for a number that is outside the plot."""
    speed, parity = row["speedup"], row["parity"]
    said = []
    if speed["value"] < SLOWEST:
        said.append(f"◂ {words.factor(speed['value'])}")
    else:
        axes.plot([speed["low"], speed["high"]], [y, y], color=colour, lw=1, zorder=2)
    if parity["value"] is None:
        said.append("not finite")
    elif None not in (parity["low"], parity["high"]):
        ends = [min(max(parity[key], low), high) for key in ("low", "high")]
        axes.plot([x, x], ends, color=colour, lw=1, zorder=2)
    if said:
        right = x > sum(axes.get_xlim()) / 2
        axes.annotate(
            ", ".join(said), (x, y), xytext=(-8 if right else 8, 0), textcoords="offset points", fontsize=8,
            va="center", ha="right" if right else "left",
        )  # fmt: skip


# --- magnitudes ---------------------------------------------------------------------------------------------


def _spans(record: Record) -> list[tuple[str, str, tuple[float, float, float]]]:
    """Return the ranges of formats to draw: label, format and base-2 logarithms.

    fp16 comes a second time, shifted by its loss scale.
    """
    out = []
    for name in _PALETTE:
        known = FORMATS[name]
        subnormal, normal, largest = map(
            math.log2, (known.smallest_subnormal, known.smallest_normal, known.max)
        )
        out.append((name, name, (subnormal, normal, largest)))
        if name == "fp16" and record["scale"] and record["scale"]["init"]:
            shift = math.log2(record["scale"]["init"])
            out.append((
                f"fp16, loss x {_power(shift)}",
                name,
                (subnormal - shift, normal - shift, largest - shift),
            ))
    return out


def _power(exponent: float) -> str:
    """Format a power of two. If the exponent is not an integer, format the plain number."""
    if exponent != round(exponent):
        return words.number(2.0**exponent)
    return "2" + f"{exponent:.0f}".translate(_RAISED)


def _reach(histograms: Sequence[Record]) -> tuple[int, int]:
    """Return the range of exponents that the axis shows. It includes all gradients and the ends of fp16."""
    low = min([-26, *(h["lowest"] for h in histograms)])
    high = max([18, *(h["lowest"] + len(h["counts"]) for h in histograms)])
    return low - 1, high + 1


def _gradients(record: Record) -> Figure | None:
    histograms = [h for h in record["histograms"] if any(h["counts"])]
    if not histograms:
        return None
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(dict(enumerate(histogram["counts"], histogram["lowest"])))
    everything = total.total()
    spans = _spans(record)
    low, high = _reach(histograms)
    figure = new_figure(2.6 + 0.3 * len(spans))
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.8, 0.3 * len(spans)])
    heights = [100 * count / everything for count in total.values()]
    top.bar(list(total), heights, width=0.92, align="edge", color=GREY, alpha=0.8)
    _powers(below, low, high)
    top.set_title("Magnitudes of gradients")
    top.set_ylabel("% of gradients")
    top.tick_params(labelbottom=False)
    for index, (label, name, ends) in enumerate(spans):
        # The bar is opaque where the format has full precision, and pale where its numbers are subnormal.
        subnormal, normal, largest = (min(max(end, low), high) for end in ends)
        colour = _PALETTE[name]
        below.barh(index, largest - normal, left=normal, height=0.78, color=colour, alpha=0.45, lw=0)
        below.barh(index, normal - subnormal, left=subnormal, height=0.78, color=colour, alpha=0.18, lw=0)
        place = ((normal + largest) / 2, index)
        below.text(*place, label, ha="center", va="center", fontsize=8.5).set_in_layout(False)
        if label != name:
            _edges(top, ends, colour, dashed=True)
    below.set_ylim(len(spans) - 0.4, -0.6)
    below.set_yticks([])
    below.spines["left"].set_visible(False)
    below.set_xlabel("magnitude of a gradient, unscaled")
    return figure


def _edges(axes: Axes, ends: Sequence[float], colour: str, dashed: bool, label: str | None = None) -> None:
    """Draw lines at both ends of a format's range, if the axis includes them."""
    low, high = axes.get_xlim()
    for edge in (ends[0], ends[2]):
        if low < edge < high:
            axes.axvline(edge, color=colour, lw=1.2, ls=(0, (3, 2)) if dashed else "-", label=label)
            label = None


def _powers(axes: Axes, low: int, high: int) -> None:
    """Set up an axis whose ticks are powers of two."""
    step = 8 if high - low <= 64 else 16 if high - low <= 128 else 32
    axes.set_xlim(low, high)
    axes.set_xticks(range(math.ceil(low / step) * step, high + 1, step))
    axes.xaxis.set_major_formatter(lambda value, _position: _power(round(value)))


def _by_region(record: Record) -> Figure | None:
    histograms = [h for h in record["histograms"] if any(h["counts"])]
    if len(histograms) < 2:
        return None
    if len(histograms) > REGIONS:
        # Large and small gradients matter: half of the rows are the regions with the largest gradients, half those with the
        # smallest.
        order = sorted(histograms, key=lambda h: (h["lowest"] + len(h["counts"]), h["lowest"]))
        keep = [*order[: REGIONS // 2], *order[-REGIONS // 2 :]]
        histograms = [h for h in histograms if h in keep]
    low, high = _reach(record["histograms"])
    names = [h["pattern"] for h in histograms]
    figure = new_figure(1.3 + row_height(names, 0.34) * len(histograms))
    axes = figure.subplots()
    for index, histogram in enumerate(histograms):
        most = max(histogram["counts"])
        # Half-widths grow with the square root of the count, so that rare magnitudes stay visible.
        edges = range(histogram["lowest"], histogram["lowest"] + len(histogram["counts"]))
        x = [edge for low_edge in edges for edge in (low_edge, low_edge + 1)]
        half = [h for count in histogram["counts"] for h in [0.44 * math.sqrt(count / most)] * 2]
        axes.fill_between(
            x, [index - h for h in half], [index + h for h in half], color=GREY, alpha=0.8, lw=0
        )
    _powers(axes, low, high)
    for label, name, ends in _spans(record):
        if name == "fp16":
            _edges(axes, ends, _PALETTE[name], dashed=label != name, label=f"ends of {label}")
    name_rows(axes, names)
    axes.set_title("By region")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8.5, handlelength=1.6, columnspacing=1.2)
    return figure


# --- regions ------------------------------------------------------------------------------------------------


def _regions(record: Record) -> Figure | None:
    def worst(row: Record) -> float:
        own = row["damage"]["value"] if row["damage"] else None
        return max([v for v in (row["bias"], row["noise"], own) if v is not None], default=-1.0)

    rows = [row for row in record["regions"] if worst(row) >= 0]
    if not rows:
        return None
    keep = sorted(rows, key=worst, reverse=True)[:REGIONS]
    rows = [row for row in rows if row in keep]
    passes, fails = record["lines"]["pass"], record["lines"]["fail"]
    kinds: tuple[tuple[str, Callable[[Record], Any], str, str], ...] = (
        ("bias", lambda row: row["bias"], COLOURS[0], "o"),
        ("noise", lambda row: row["noise"], COLOURS[2], "D"),
        ("the data's noise", lambda row: row["data_noise"], GREY, "|"),
        (
            "damage with only this region in the low format",
            lambda row: row["damage"] and row["damage"]["value"],
            COLOURS[6],
            "X",
        ),
    )
    found = [v for _, get, _, _ in kinds for row in rows if (v := get(row))]
    low = max(min([passes, *found]) / 3, _LEAST)
    high = max([3 * fails, *(3 * v for v in found)])
    names = [row["pattern"] or "(model)" for row in rows]
    figure = new_figure(1.75 + row_height(names, 0.3) * len(rows))
    axes = figure.subplots()
    axes.set_xscale("log")
    for label, get, colour, marker in kinds:
        # Bias and noise are often equal, so one is drawn a little above the middle of the row and the other below.
        off = {"bias": -0.13, "noise": 0.13}.get(label, 0.0)
        points = [(max(v, low), i + off) for i, row in enumerate(rows) if (v := get(row)) is not None]
        if points:
            size = 130.0 if marker == "|" else 34.0
            widths = 1.8 if marker == "|" else 0.0
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=size, c=colour, marker=marker, label=label, zorder=3, linewidths=widths)
    for value in (passes, fails):
        axes.axvline(value, color=GREY, lw=1, ls=(0, (3, 2)), zorder=1)
    axes.set_xlim(low / 1.6, high)
    name_rows(axes, names)
    axes.grid(visible=True, axis="y")
    axes.set_title("Damage by region")
    axes.set_xlabel("relative error of an update")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8.5, handletextpad=0.2, columnspacing=1.2)
    return figure


PICTURES = {
    "scatter": Picture(
        _scatter, "Speed over fp32 against the error of each plan",
        "Every plan whose speed and error were both measured, with intervals; lower right is better. The other plans are "
        "only in the table.",
    ),
    "gradients": Picture(
        _gradients, "Histogram of gradient magnitudes with the ranges of formats",
        "Gradients of the model's modules in fp32, per power of two, with the ranges of the formats below: pale where a "
        "format is subnormal, empty beyond its range. A loss scale moves fp16's range (dashed) down.",
    ),
    "gradients_by_region": Picture(
        _by_region, "Gradient magnitudes of each region",
        "The magnitudes of each region's gradients; the width grows with the square root of their number.",
    ),
    "regions": Picture(
        _regions, "Bias and noise of each region",
        "Each region's part of the damage, which is the relative error of an update. Dashed: the limits for the whole plan.",
    ),
}  # fmt: skip
