"""Pictures of a search: magnitudes of gradients, speed against damage, and the regions' part in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from castwise.report import text, tune_text
from castwise.report.plots import _COLOURS, _GREY, _INK, _figure, _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["RANGES", "tune_figures"]

Record = Mapping[str, Any]

RANGES = {
    "bf16": (-133.0, -126.0, 128.0),
    "fp16": (-24.0, -14.0, 16.0),
    "fp8_e5m2": (-16.0, -14.0, 15.8074),
    "fp8_e4m3": (-9.0, -6.0, 8.8074),
}
"""Base-2 logarithms of the smallest subnormal, the smallest normal and the largest value of formats."""
_PALETTE = {"bf16": _COLOURS[0], "fp16": _COLOURS[1], "fp8_e5m2": _COLOURS[4], "fp8_e4m3": _COLOURS[3]}
_STATUS = {
    "chosen": (_COLOURS[0], "*", 190.0),
    "sound": (_COLOURS[2], "o", 42.0),
    "rejected": (_COLOURS[6], "X", 48.0),
    "baseline": (_GREY, "s", 42.0),
}
REGIONS = 16
"""Regions that a picture shows at most: those with the largest gradients, or with the largest damage."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SLOWEST = 0.4
"""Plans that are slower, as parts of fp32's speed, are drawn here and labelled."""
_LEAST = 1e-9
"""Damage that is smaller is drawn here."""


def tune_figures(record: Record, ink: str = _INK) -> dict[str, Figure]:
    """Every picture that a search's record has numbers for.

    Args:
        record: As ``TuneResult.to_dict`` gives it.
        ink: Colour of letters.

    Returns:
        Figures by name: ``scatter``, ``gradients``, ``gradients_by_region``, ``regions``.
    """
    makers: dict[str, Callable[[Record], Figure | None]] = {
        "scatter": _scatter, "gradients": _gradients, "gradients_by_region": _by_region, "regions": _regions
    }  # fmt: skip
    with _style(ink):
        drawn = {name: make(record) for name, make in makers.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


# --- speed against damage -----------------------------------------------------------------------------------


def _scatter(record: Record) -> Figure | None:
    rows = [r for r in record["candidates"] if r["parity"] and r["speedup"] and r["speedup"]["value"]]
    if not rows:
        return None
    from matplotlib.ticker import FuncFormatter

    passes, fails = tune_text.lines(record)
    known = [r["parity"]["value"] for r in rows if r["parity"]["value"] is not None]
    low = max(_LEAST, min([passes, *(v for v in known if v > 0)]) / 4)
    endless = any(r["parity"]["value"] is None for r in rows)
    high = max([10 * fails, *(4 * v for v in known)]) * (8 if endless else 1)
    figure = _figure(3.9)
    axes = figure.subplots()
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    speeds = [max(r["speedup"]["value"], SLOWEST) for r in rows]
    left, right = min([1.0, *speeds]), max([1.0, *speeds])
    room = 0.12 * max(right - left, 0.1)
    axes.set_xlim(left - room, right + room)
    axes.axhspan(fails, high, color=_COLOURS[6], alpha=0.10, lw=0)
    axes.axhspan(passes, fails, color=_COLOURS[5], alpha=0.13, lw=0)
    axes.axvline(1.0, color=_GREY, lw=1, ls=(0, (2, 2)))
    end = axes.get_xlim()[0]
    for value, word in ((fails, "fails above"), (passes, "passes below")):
        axes.axhline(value, color=_GREY, lw=1)
        axes.annotate(
            f"{word} {value:g}",
            (end, value),
            xytext=(3, 2),
            textcoords="offset points",
            fontsize=8,
            va="bottom",
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
    axes.set_title("Speed against what it does to gradients")
    axes.set_xlabel("speed over fp32")
    axes.set_ylabel("damage: relative error of an update")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}x"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, handletextpad=0.2, columnspacing=1.2)
    return figure


def _error_bars(axes: Axes, row: Record, x: float, y: float, low: float, high: float, colour: str) -> None:
    """The intervals of a point, or words where it lies outside the picture."""
    speed, parity = row["speedup"], row["parity"]
    said = []
    if speed["value"] < SLOWEST:
        said.append(f"◂ {text.format_factor(speed['value'])}")
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
    """The ranges to draw: label, format and ends; fp16 once more where its loss scale moves it."""
    out = []
    for name, ends in RANGES.items():
        out.append((name, name, ends))
        scale = record["scale"]
        if name == "fp16" and scale and scale["init"]:
            shift = math.log2(scale["init"])
            out.append((
                f"fp16, loss x {_power(shift)}",
                name,
                (ends[0] - shift, ends[1] - shift, ends[2] - shift),
            ))
    return out


def _power(exponent: float) -> str:
    """A power of two as people write it, or the number where the exponent is not whole."""
    if exponent != round(exponent):
        return tune_text.format_number(2.0**exponent)
    return "2" + f"{exponent:.0f}".translate(_RAISED)


def _reach(histograms: Sequence[Record]) -> tuple[int, int]:
    """Exponents that the axis shows: all gradients, and the ends of fp16."""
    low = min([-26, *(h["lowest"] for h in histograms)])
    high = max([18, *(h["lowest"] + len(h["counts"]) for h in histograms)])
    return low - 1, high + 1


def _gradients(record: Record) -> Figure | None:
    histograms = [h for h in record["histograms"] if any(h["counts"])]
    if not histograms:
        return None
    total: dict[int, int] = {}
    for histogram in histograms:
        for index, count in enumerate(histogram["counts"]):
            exponent = histogram["lowest"] + index
            total[exponent] = total.get(exponent, 0) + count
    everything = sum(total.values())
    spans = _spans(record)
    low, high = _reach(histograms)
    figure = _figure(2.6 + 0.3 * len(spans))
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.8, 0.3 * len(spans)])
    exponents = sorted(total)
    top.bar(
        exponents,
        [100 * total[e] / everything for e in exponents],
        width=0.92,
        align="edge",
        color=_GREY,
        alpha=0.8,
    )
    top.set_title("Magnitudes of gradients")
    top.set_ylabel("% of gradients")
    top.tick_params(labelbottom=False)
    for index, (label, name, (subnormal, normal, largest)) in enumerate(spans):
        _span(below, index, label, _PALETTE[name], (subnormal, normal, largest), (low, high))
    if record["scale"] and record["scale"]["init"]:
        shifted = next(ends for label, _, ends in spans if label.startswith("fp16,"))
        for edge in (shifted[0], shifted[2]):
            if low < edge < high:
                top.axvline(edge, color=_PALETTE["fp16"], lw=1.2, ls=(0, (3, 2)))
    below.set_ylim(len(spans) - 0.4, -0.6)
    below.set_yticks([])
    below.spines["left"].set_visible(False)
    below.set_xlim(low, high)
    _powers(below, low, high)
    below.set_xlabel("magnitude of a gradient, unscaled")
    return figure


def _span(
    axes: Axes, index: int, label: str, colour: str, ends: tuple[float, float, float], reach: tuple[int, int]
) -> None:
    """A format's range as a bar: full where it has full precision, pale among its subnormals."""
    subnormal, normal, largest = (min(max(end, reach[0]), reach[1]) for end in ends)
    axes.barh(index, largest - normal, left=normal, height=0.78, color=colour, alpha=0.45, lw=0)
    axes.barh(index, normal - subnormal, left=subnormal, height=0.78, color=colour, alpha=0.18, lw=0)
    axes.text((normal + largest) / 2, index, label, ha="center", va="center", fontsize=8.5).set_in_layout(
        False
    )


def _powers(axes: Axes, low: int, high: int) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter

    step = 8 if high - low <= 64 else 16 if high - low <= 128 else 32
    axes.xaxis.set_major_locator(FixedLocator(range(math.ceil(low / step) * step, high + 1, step)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: _power(round(value))))


def _by_region(record: Record) -> Figure | None:
    histograms = [h for h in record["histograms"] if any(h["counts"])]
    if len(histograms) < 2:
        return None
    if len(histograms) > REGIONS:
        # Both ends matter: half of the rows to the largest gradients, half to the smallest.
        order = sorted(range(len(histograms)), key=lambda i: _middle(histograms[i]))
        keep = {*order[: REGIONS // 2], *order[-REGIONS // 2 :]}
        histograms = [h for i, h in enumerate(histograms) if i in keep]
    low, high = _reach(record["histograms"])
    figure = _figure(1.3 + 0.34 * len(histograms))
    axes = figure.subplots()
    for index, histogram in enumerate(histograms):
        most = max(histogram["counts"])
        # A ridge: half-widths grow with the root of the count, so that rare magnitudes stay visible.
        x: list[float] = []
        half: list[float] = []
        for offset, count in enumerate(histogram["counts"]):
            edge = histogram["lowest"] + offset
            x += [edge, edge + 1]
            half += [0.44 * math.sqrt(count / most)] * 2
        axes.fill_between(
            x, [index - h for h in half], [index + h for h in half], color=_GREY, alpha=0.8, lw=0, step=None
        )
    spans = [(label, ends) for label, name, ends in _spans(record) if name == "fp16"]
    for number, (label, ends) in enumerate(spans):
        for which, edge in enumerate((ends[0], ends[2])):
            if low < edge < high:
                style = "-" if number == 0 else (0, (3, 2))
                axes.axvline(
                    edge,
                    color=_PALETTE["fp16"],
                    lw=1.2,
                    ls=style,
                    label=None if which else f"ends of {label}",
                )
    axes.set_yticks(range(len(histograms)), [_tail(h["pattern"]) for h in histograms])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(histograms) - 0.4, -0.6)
    axes.set_xlim(low, high)
    _powers(axes, low, high)
    axes.set_title("By region", loc="left")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8.5, handlelength=1.6, columnspacing=1.2)
    return figure


def _middle(histogram: Record) -> float:
    total = sum(histogram["counts"])
    weighted = sum(i * n for i, n in enumerate(histogram["counts"]))
    return float(histogram["lowest"] + weighted / total)


def _tail(pattern: str) -> str:
    """A module path cut at its front, where paths are alike."""
    return pattern if len(pattern) <= 18 else f"…{pattern[-17:]}"


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
    passes, fails = tune_text.lines(record)
    kinds: tuple[tuple[str, Callable[[Record], Any], str, str], ...] = (
        ("bias", lambda row: row["bias"], _COLOURS[0], "o"),
        ("noise", lambda row: row["noise"], _COLOURS[2], "D"),
        ("the data's noise", lambda row: row["data_noise"], _GREY, "|"),
        ("alone in the low format", lambda row: row["damage"] and row["damage"]["value"], _COLOURS[6], "X"),
    )
    found = [v for _, get, _, _ in kinds for row in rows if (v := get(row))]
    low = max(min([passes, *found]) / 3, _LEAST)
    high = max([3 * fails, *(3 * v for v in found)])
    figure = _figure(1.75 + 0.3 * len(rows))
    axes = figure.subplots()
    axes.set_xscale("log")
    for label, get, colour, marker in kinds:
        # Bias and noise are often equal: one a little above the row's line, the other below.
        off = {"bias": -0.13, "noise": 0.13}.get(label, 0.0)
        points = [(max(v, low), i + off) for i, row in enumerate(rows) if (v := get(row)) is not None]
        if points:
            size = 130.0 if marker == "|" else 34.0
            widths = 1.8 if marker == "|" else 0.0
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=size, c=colour, marker=marker, label=label, zorder=3, linewidths=widths)
    for value in (passes, fails):
        axes.axvline(value, color=_GREY, lw=1, ls=(0, (3, 2)), zorder=1)
    axes.set_xlim(low / 1.6, high)
    axes.set_yticks(range(len(rows)), [_tail(row["pattern"] or "(model)") for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="y")
    axes.set_title("Damage by region")
    axes.set_xlabel("relative error of an update")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8.5, handletextpad=0.2, columnspacing=1.2)
    return figure
