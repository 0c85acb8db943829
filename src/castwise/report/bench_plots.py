"""Plot the result of a bench: bars of times and memory, losses, and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from castwise.report import words
from castwise.report.plots import (
    COLOURS,
    GREY,
    WIDTH,
    Picture,
    Record,
    draw_curves,
    folded,
    name_rows,
    new_figure,
    plain,
    row_height,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CUT = 3.0
"""Bars that are longer than this many times the baseline's bar are cut."""


def baseline(record: Record) -> Record:
    """Return the row of the plan with which the others are compared."""
    found: Record = next(row for row in record["plans"] if row["name"] == record["baseline"])
    return found


def _colours(record: Record) -> dict[str, str]:
    """Return one colour per plan, the same in every picture. The baseline is grey."""
    others = [row["name"] for row in record["plans"] if row["name"] != record["baseline"]]
    return {record["baseline"]: GREY} | {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(others)}


# --- bars ---------------------------------------------------------------------------------------------------


class _Bar(NamedTuple):
    """A bar with a whisker from ``value - below`` to ``value + above``. Without a value, only the label is drawn."""

    name: str
    label: str
    value: float | None = None
    below: float = 0.0
    above: float = 0.0


def _bars(record: Record, panels: Sequence[tuple[str, Sequence[_Bar]]]) -> Figure | None:
    """Draw panels of horizontal bars one below the other. The height of each panel follows its number of bars."""
    if not panels:
        return None
    heights = [0.42 + row_height([bar.name for bar in bars], 0.3) * len(bars) for _, bars in panels]
    figure = new_figure(0.1 + sum(heights))
    places = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, bars) in zip(places, panels, strict=True):
        _panel(axes, title, bars, _colours(record))
    return figure


def _panel(axes: Axes, title: str, bars: Sequence[_Bar], colours: Mapping[str, str]) -> None:
    """Draw horizontal bars from top to bottom.

    The first bar is the baseline's. A bar longer than ``CUT`` times the baseline's is cut and marked, so that the other bars
    stay readable.
    """
    import matplotlib

    ink = matplotlib.rcParams["text.color"]
    longest = max((bar.value for bar in bars if bar.value is not None), default=1.0)
    cut_at = CUT * (bars[0].value or longest)
    top = min(longest, cut_at) or 1.0
    room = 1.2 * top
    for index, (name, label, value, below, above) in enumerate(bars):
        end = 0.0
        if value is not None:
            axes.barh(index, min(value, cut_at), height=0.62, color=colours[name])
            if value > cut_at:
                axes.text(
                    0.94 * cut_at, index, "//", va="center", ha="center", color="white", fontweight="bold"
                )
            elif below or above:
                # A whisker that would leave the figure is drawn only as far as there is room beside the label.
                whisker = [[min(below, value)], [max(0.0, min(above, room - value))]]
                axes.errorbar(value, index, xerr=whisker, color=ink, lw=1, capsize=2)
            end = cut_at if value > cut_at else min(value + above, max(room, value))
        axes.text(end + 0.015 * top, index, plain(label), va="center", ha="left").set_in_layout(False)
    axes.set_title(title)
    name_rows(axes, [bar.name for bar in bars])
    axes.set_xlim(0, top * 2.0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _times(record: Record) -> Figure | None:
    def bar(row: Record, stage: str) -> _Bar:
        if not (timing := row[stage]):
            return _Bar(row["name"], _why_not(row))
        step, speed = timing["step"], timing["speedup"]
        median = step["median_s"]
        label = words.time(median) + (f", {words.factor(speed['value'])}" if speed else "")
        return _Bar(row["name"], label, median, median - step["q1_s"], step["q3_s"] - median)

    # Plans without numbers are named once, beside the training times.
    timed = [row for row in record["plans"] if row["inference"]]
    rows = {"training": record["plans"], "inference": timed if record["trains"] else record["plans"]}
    titles = {"training": "Time of a training step", "inference": "Time of an inference call"}
    stages = [stage for stage in titles if any(row[stage] for row in rows[stage])]
    return _bars(record, [(titles[stage], [bar(row, stage) for row in rows[stage]]) for stage in stages])


def _why_not(row: Record) -> str:
    if row["status"] == "stopped":
        return str(row["reason"])
    if row["status"] == "unsupported":
        return "cannot run here"
    return "not measured" if row["status"] == "ok" else str(row["status"])


def _memory(record: Record) -> Figure | None:
    base = baseline(record)
    panels = []
    for key, title in (
        ("training_peak_bytes", "Peak memory, training"),
        ("inference_peak_bytes", "Peak memory, inference"),
        ("saved_bytes", "Kept for the backward pass"),
    ):
        held = [
            (row, size) for row in record["plans"] if (size := (row["memory"] or {}).get(key)) is not None
        ]
        reference = (base["memory"] or {}).get(key)
        bars = [
            _Bar(row["name"], words.against(size, None if row is base else reference), size)
            for row, size in held
        ]
        panels += [(title, bars)] if bars else []
    return _bars(record, panels)


# --- learning -----------------------------------------------------------------------------------------------


def _losses(record: Record) -> Figure | None:
    curves = {
        row["name"]: row["losses"] for row in record["plans"] if row["status"] == "ok" and row["losses"]
    }
    if not curves:
        return None
    figure = new_figure(2.9)
    draw_curves(figure, curves, _colours(record))
    return figure


def _images(record: Record) -> Figure | None:
    images = record["images"]
    if not images:
        return None
    columns = min(3, len(images))
    lines = -(-len(images) // columns)
    figure = new_figure(0.2 + lines * (WIDTH / columns + 0.2))
    known = [x for line in images.get("target", next(iter(images.values()))) for x in line if x is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, (name, picture) in zip(grid.flat, images.items(), strict=False):
        rows = [[float("nan") if x is None else x for x in line] for line in picture]
        axes.imshow(rows, vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
        axes.set_title(folded(name), fontsize=8.5, fontweight="normal")
    return figure


PICTURES = {
    "time": Picture(
        _times, "time of each plan",
        "Medians, whiskers from the first to the third quartile; shorter is faster. A bar with // is cut off.",
    ),
    "memory": Picture(
        _memory, "memory of each plan", "Peak of allocated memory; each plan ran in its own process."
    ),
    "loss": Picture(
        _losses, "loss of each plan", "Every plan started from the same weights and saw the same batches."
    ),
    "prediction": Picture(
        _images, "prediction of each plan", "The target, and the prediction of each plan's model after training."
    ),
}  # fmt: skip
