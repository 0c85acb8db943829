"""Pictures of a bench: bars of times and memory, losses, and what models have learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from castwise.report import words
from castwise.report.plots import (
    COLOURS,
    GREY,
    WIDTH,
    Picture,
    Record,
    cut,
    draw_curves,
    name_rows,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "baseline"]

CUT = 3.0
"""Bars longer than this many times the baseline's are cut."""


def baseline(record: Record) -> Record:
    """The row that the others are compared with."""
    found: Record = next(row for row in record["plans"] if row["name"] == record["baseline"])
    return found


def _colours(record: Record) -> dict[str, str]:
    """One colour per plan, the same in every picture; the baseline grey."""
    others = [row["name"] for row in record["plans"] if row["name"] != record["baseline"]]
    return {record["baseline"]: GREY} | {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(others)}


# --- bars ---------------------------------------------------------------------------------------------------


def _bars(
    axes: Axes,
    title: str,
    names: Sequence[str],
    values: Sequence[float | None],
    labels: Sequence[str],
    colours: Mapping[str, str],
    errors: Sequence[tuple[float, float]] | None = None,
) -> None:
    """Horizontal bars from the top down, each labelled at its end; a missing value shows its label alone.

    A bar longer than ``CUT`` times the baseline's, the first, is cut and marked, so that the others stay readable.
    """
    import matplotlib

    ink = matplotlib.rcParams["text.color"]
    known = [v for v in values if v is not None]
    cut_at = CUT * (values[0] or max(known, default=1.0))
    top = min(max(known, default=1.0), cut_at) or 1.0
    room = 1.2 * top
    for index, (name, value, label) in enumerate(zip(names, values, labels, strict=True)):
        end = 0.0
        if value is not None:
            below, above = errors[index] if errors is not None else (0.0, 0.0)
            axes.barh(index, min(value, cut_at), height=0.62, color=colours[name])
            if value > cut_at:
                axes.text(
                    0.94 * cut_at, index, "//", va="center", ha="center", color="white", fontweight="bold"
                )
            elif errors is not None:
                # A whisker that would leave the figure is drawn as far as there is room for its label.
                whisker = [[min(below, value)], [max(0.0, min(above, room - value))]]
                axes.errorbar(value, index, xerr=whisker, color=ink, lw=1, capsize=2)
            end = cut_at if value > cut_at else min(value + above, max(room, value))
        axes.text(end + 0.015 * top, index, label, va="center", ha="left").set_in_layout(False)
    axes.set_title(title)
    name_rows(axes, [cut(name) for name in names])
    axes.set_xlim(0, top * 1.62)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _panels(counts: Sequence[int]) -> tuple[Figure, list[Axes]]:
    """A figure with panels of bars one below the other, each as high as it has bars."""
    heights = [0.42 + 0.3 * count for count in counts]
    figure = new_figure(0.1 + sum(heights))
    return figure, list(figure.subplots(len(counts), 1, squeeze=False, height_ratios=heights)[:, 0])


def _times(record: Record) -> Figure | None:
    # Plans without numbers are named once, beside the training times.
    parts = {
        "training": ("Time of a training step", record["plans"]),
        "inference": ("Time of an inference call", [row for row in record["plans"] if row["inference"]]),
    }
    parts = {stage: part for stage, part in parts.items() if any(row[stage] for row in part[1])}
    if not parts:
        return None
    figure, panels = _panels([len(rows) for _, rows in parts.values()])
    for axes, (stage, (title, rows)) in zip(panels, parts.items(), strict=True):
        values: list[float | None] = []
        labels, errors = [], []
        for row in rows:
            if timing := row[stage]:
                median, speed = timing["step"]["median_s"], timing["speedup"]
                values.append(median)
                errors.append((median - timing["step"]["q1_s"], timing["step"]["q3_s"] - median))
                labels.append(words.time(median) + (f", {words.factor(speed['value'])}" if speed else ""))
            else:
                values.append(None)
                errors.append((0.0, 0.0))
                labels.append(_why_not(row))
        _bars(axes, title, [row["name"] for row in rows], values, labels, _colours(record), errors)
    return figure


def _why_not(row: Record) -> str:
    if row["status"] == "stopped":
        return str(row["reason"])
    if row["status"] == "unsupported":
        return "cannot run here"
    return "not measured" if row["status"] == "ok" else str(row["status"])


def _memory(record: Record) -> Figure | None:
    kinds = (
        ("training_peak_bytes", "Peak memory, training"),
        ("inference_peak_bytes", "Peak memory, inference"),
        ("saved_bytes", "Kept for the backward pass"),
    )
    parts = [
        (key, title, rows)
        for key, title in kinds
        if (rows := [row for row in record["plans"] if (row["memory"] or {}).get(key) is not None])
    ]
    if not parts:
        return None
    base = baseline(record)
    figure, panels = _panels([len(rows) for _, _, rows in parts])
    for axes, (key, title, rows) in zip(panels, parts, strict=True):
        values = [row["memory"][key] for row in rows]
        reference = (base["memory"] or {}).get(key)
        labels = [words.against(row["memory"][key], None if row is base else reference) for row in rows]
        _bars(axes, title, [row["name"] for row in rows], values, labels, _colours(record))
    return figure


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
        axes.set_title(cut(name), fontsize=8.5, fontweight="normal")
    return figure


PICTURES = {
    "time": Picture(
        _times, "time of each plan",
        "Medians, whiskers from the first to the third quartile; shorter is faster. A bar with // is longer.",
    ),
    "memory": Picture(
        _memory, "memory of each plan", "Most that was allocated at once, each plan in a process of its own."
    ),
    "loss": Picture(
        _losses, "loss of each plan", "Every plan started from the same weights and saw the same batches."
    ),
    "prediction": Picture(
        _images, "prediction of each plan", "The target, and what each plan's model makes of it after training."
    ),
}  # fmt: skip
