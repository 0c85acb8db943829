"""Show how formats change the numbers of a model, in the terminal and as a page with the magnitudes in every module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from castwise.report import words
from castwise.report.grids import Columns, Grid, Line, opening
from castwise.report.plots import COLOURS, Picture

Record = Mapping[str, Any]

PICTURES: Mapping[str, Picture] = {}
"""This page has no separate pictures: histograms are drawn in its rows."""
_MOST = 12
"""Largest number of rows of a list in the terminal."""
_COLOURS = {"bf16": COLOURS[0], "fp16": COLOURS[1], "fp8_e5m2": COLOURS[4], "fp8_e4m3": COLOURS[3]}
_WIDTH, _BARS, _STRIP = 240, 30, 5
"""Sizes in pixels: a histogram's width, the height of its bars, and the height of the strip that shows a format's range."""


def lines(record: Record) -> list[Grid | Line]:
    """Return the lines and tables for the terminal.

    They are the answer, the resulting plan, which formats can represent the numbers of which modules, and why others cannot.
    """
    bad = [region for region in record["regions"] if region["troubles"]]
    columns: Columns = {
        "region": lambda region: region["path"] or "(the model itself)",
        **{name: _holds(record, name) for name in record["formats"]},
        "plan": _planned,
        "loss scales": lambda region: _scales(region["scales"]),
    }
    reached = {path for spread in record["spreads"].values() for path in spread["reached"]}
    worst = sorted(
        record["regions"], key=lambda region: (-len(region["troubles"]), region["path"] not in reached)
    )
    shown = worst[:_MOST]
    more = len(record["regions"]) - len(shown)
    why = [
        {"region": region["path"] or "(the model itself)", "format": name, "why": reason}
        for region in bad
        for name, reason in region["troubles"].items()
    ]
    reasons: Columns = {"region": "region", "format": "format", "why": "why"}
    return [
        Line(record["answer"], "bold"),
        *(Line(f"Plan: {plan}", "green") for plan in [record["recommendation"]] if plan),
        *(Line(said) for said in [record["plan_answer"]] if said),
        Line(),
        Grid.of("What holds", shown, columns),
        *([Line(f"and {more} more regions", "dim")] if more else ()),
        *([Grid.of("Why not", why[:_MOST], reasons)] if why else ()),
        *([Line(f"and {len(why) - _MOST} more reasons", "dim")] if len(why) > _MOST else ()),
        *(Line(note, "yellow") for note in record["notes"]),
        *(Line(f"reached: {TERMS['reached']}.", "dim") for _ in [*record["spreads"]][:1]),
        Line(f"{_means(record)} {words.where(record)}", "dim"),
    ]


def brief(record: Record) -> list[Grid | Line]:
    """Return only the lines before the first table: the answer and the plan."""
    return opening(lines(record))


def values(record: Record) -> dict[str, Any]:
    """Return the values for the page's template, by name: the answer, and the tensors of every module."""
    low, high = _axis(record)
    return {
        "answer": record["answer"],
        "facts": _facts(record),
        "rows": [
            _row(record, region, tensor, low, high)
            for region in record["regions"]
            for tensor in region["tensors"]
        ],
        "kinds": list(dict.fromkeys(t["kind"] for region in record["regions"] for t in region["tensors"])),
        "colours": {name: _COLOURS[name] for name in record["formats"]},
        "axis": (low, high),
        "means": _means(record),
        "terms": TERMS,
    }


TERMS = {
    "overflow": "too large for the format: they become infinite, or the largest value in fp8_e4m3, which has no infinity",
    "become 0": "nonzero, but too small for the format",
    "subnormal": "below the smallest normal number of the format, which holds them with fewer digits",
    "dropped": "updates that are too small to change a weight stored in the format without masters",
    "error": "relative error of rounding: the norm of the change over the norm of the values",
    "reached": "can hold its own numbers, but gets infinities from a region that cannot",
}


def _means(record: Record) -> str:
    return (
        f"Measured on {record['microbatches']} microbatches in fp32; casts are those of {record['words']}. A format holds a region "
        "if none of its numbers overflow and underflow loses at most 0.01 % of their squared norm; castwise.parity tests whether "
        "the format is also precise enough."
    )


def _holds(record: Record, name: str) -> Any:
    reached = record["spreads"].get(name, {"reached": ()})["reached"]
    return lambda region: (
        "no" if name in region["troubles"] else "reached" if region["path"] in reached else "holds"
    )


def _planned(region: Record) -> str:
    """Return the format in which the plan computes a module."""
    return (
        ", ".join(region["computed"]) + (", no" if region["trouble"] else "")
        if region["computed"]
        else "fp32"
    )


def _scales(scales: Record | None) -> str | None:
    """Return the range of loss scales with which a format can represent a module's numbers, as ``0.2 to 65,000``."""
    if scales is None:
        return None
    return f"{words.number(scales['lowest_scale'])} to {words.number(scales['highest_scale'])}"


def _facts(record: Record) -> list[tuple[str, str]]:
    facts = [("plan that follows", record["recommendation"] or "none")]
    if record["scales"] is not None:
        facts += [
            ("loss scales without overflow or underflow in fp16", _scales(record["scales"]) or "-"),
            ("loss scale used for gradients in fp16", words.number(record["loss_scale"])),
        ]
    return facts


# --- rows of the page ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The effect of a format on the tensors of a row of the page.

    Attributes:
        said: The effects in words: infinities that arrive from other modules, shares of values that are lost, and the error.
        order: Size of the effect, by which rows are sorted.
        bad: Whether the format cannot represent the tensors.
    """

    format: str
    said: str
    order: float
    bad: bool


@dataclass(frozen=True)
class PageRow:
    """A row of the page: the tensors of one kind in one module, for example its activations.

    Attributes:
        plan: The format in which the plan computes the module.
        bars: The histogram for the page's script: the lowest exponent, the counts, and last the number of zeros.
    """

    path: str
    module: str
    plan: str
    kind: str
    kept: bool
    count: int
    largest: float
    largest_said: str
    picture: str
    bars: str
    cells: tuple[Cell, ...]
    bad: bool


def _row(record: Record, region: Record, tensor: Record, low: int, high: int) -> PageRow:
    cells = tuple(_cell(record, region, tensor, name) for name in record["formats"])
    histogram = tensor["histogram"]
    return PageRow(
        region["path"] or "(the model itself)",
        region["module"],
        _planned(region).replace(", no", ", which cannot hold it"),
        tensor["kind"],
        tensor["kept"],
        tensor["count"],
        tensor["largest"] or 0.0,
        f"{tensor['largest'] or 0.0:.2g}",
        _picture(record, tensor, low, high),
        " ".join(map(str, (histogram["lowest"], *histogram["counts"], histogram["zeros"]))),
        cells,
        any(cell.bad for cell in cells),
    )


def _cast(tensor: Record, name: str) -> Record | None:
    """Return the cast of a tensor to a format as training would make it: with the loss scale, if there is one."""
    found = [cast for cast in tensor["casts"] if cast["format"] == name]
    return next((cast for cast in found if cast["scale"] is not None), found[0] if found else None)


def _some(paths: Sequence[str]) -> str:
    return (paths[0] or "the model itself") + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _cell(record: Record, region: Record, tensor: Record, name: str) -> Cell:
    cast = _cast(tensor, name)
    if cast is None:
        return Cell(name, "-", -1.0, False)
    lost = "dropped" if tensor["kind"] == "updates" else "become 0"
    parts = {"overflow": cast["overflow"], lost: cast["flush"], "subnormal": cast["subnormal"]}
    said = [f"{words.percent(share)} {what}" for what, share in parts.items() if share]
    said.append(f"error {words.percent(cast['error'])}")
    spread = record["spreads"].get(name)
    if spread is not None and tensor["kind"] == "activations" and region["path"] in spread["reached"]:
        said.insert(0, f"reached by inf from {_some(spread['sources'])}")
    bad = region["troubles"].get(name, "") if not tensor["kept"] else ""
    return Cell(
        name,
        ", ".join(said),
        1e3 * cast["overflow"] + cast["flush"] + cast["error"],
        f"the {tensor['kind']} " in bad,
    )


def _axis(record: Record) -> tuple[int, int]:
    """Return the range of exponents that every histogram shows. It includes all values and the ends of fp16."""
    shown = [
        t["histogram"] for region in record["regions"] for t in region["tensors"] if t["histogram"]["counts"]
    ]
    low = min([-26, *(h["lowest"] for h in shown)])
    high = max([18, *(h["lowest"] + len(h["counts"]) for h in shown)])
    return max(low, -64), min(high, 64)


def _picture(record: Record, tensor: Record, low: int, high: int) -> str:
    """Draw a histogram over exponents as SVG, with the range of each format below it. Subnormal numbers are pale."""
    histogram = tensor["histogram"]
    most = max(histogram["counts"], default=0)

    def x(exponent: float) -> float:
        return round(_WIDTH * (min(max(exponent, low), high) - low) / (high - low), 1)

    height = _BARS + 2 + _STRIP * len(record["formats"])
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="magnitudes, and ranges of formats below">'
    ]
    path = ""
    for at, count in enumerate(histogram["counts"], histogram["lowest"]):
        if count:
            tall = _BARS * math.sqrt(count / most)
            path += f"M{x(at)} {_BARS}V{_BARS - tall:.1f}H{x(at + 1)}V{_BARS}Z"
    parts.append(f'<path d="{path}" fill="currentColor" opacity=".55"/>')
    parts.append(f'<path d="M{x(0)} 0V{height}" stroke="currentColor" stroke-width=".7" opacity=".6"/>')
    for row, name in enumerate(record["formats"]):
        ends = record["ranges"][name]
        parts += _strip(name, x, _shift(tensor, name, ends[2]), _BARS + 2 + _STRIP * row, ends)
    return "".join((*parts, "</svg>"))


def _shift(tensor: Record, name: str, top: float) -> float:
    """Return the power of two by which a scale shifts a format's range relative to the values. ``top`` is the range's end."""
    cast = _cast(tensor, name)
    if cast is None or cast["scale"] is None or not tensor["largest"]:
        return 0.0
    if isinstance(cast["scale"], str):  # with a scale per tensor, the range ends at the largest value
        return math.log2(top / tensor["largest"])
    return math.log2(cast["scale"])


def _strip(name: str, x: Any, shift: float, y: int, ends: Sequence[float]) -> list[str]:
    subnormal, normal, largest = (x(math.log2(end) - shift) for end in ends)
    colour, tall = _COLOURS[name], _STRIP - 1
    mark = f' class="strip {name}"'
    return [
        f'<rect{mark} x="{normal}" y="{y}" width="{round(largest - normal, 1)}" height="{tall}" fill="{colour}"/>',
        f'<rect{mark} x="{subnormal}" y="{y}" width="{round(normal - subnormal, 1)}" height="{tall}" fill="{colour}" opacity=".35"/>',
    ]  # fmt: skip
