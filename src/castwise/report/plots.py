"""Pictures of a record by matplotlib: SVG that takes the page's colours, and PNG files.

A figure is drawn at the width of a phone, so that its letters stay legible there; a page puts several side by side
where it has room.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise.report import text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["bench_figures", "curves_figure", "plot_curves", "save_png", "to_svg"]

Record = Mapping[str, Any]

WIDTH = 4.2
"""Inches; at 100 units per inch about the width of a phone."""
CUT = 3.0
"""Bars longer than this many times the baseline's are cut."""
_INK = "#1b1f24"
_SENTINEL = "#010203"
"""Stands for the page's own text colour while an SVG is drawn."""
_GREY = "#8a8f98"
_BASE = "#8a8f98"
_COLOURS = ("#2f6fde", "#e0872b", "#2a9d74", "#c2479c", "#7a5bd6", "#b8a01f", "#d1495b", "#3aa6c9")


@contextlib.contextmanager
def _style(ink: str) -> Iterator[None]:
    import matplotlib

    settings: dict[Any, Any] = {
        "font.size": 9.5, "font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "castwise",
        "axes.edgecolor": _GREY, "axes.labelcolor": ink, "axes.titlesize": 10.5, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "text.color": ink,
        "axes.titlecolor": ink, "xtick.color": _GREY, "ytick.color": _GREY, "xtick.labelcolor": ink,
        "ytick.labelcolor": ink, "axes.linewidth": 0.8, "legend.frameon": False, "legend.labelcolor": ink,
        "axes.grid": False, "grid.color": _GREY, "grid.alpha": 0.25, "figure.facecolor": "none",
        "axes.facecolor": "none", "savefig.facecolor": "none",
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        yield


def _colours(record: Record) -> dict[str, str]:
    """One colour per plan, the same in every picture; the baseline grey."""
    others = [row["name"] for row in record["plans"] if row["name"] != record["baseline"]]
    return {record["baseline"]: _BASE} | {n: _COLOURS[i % len(_COLOURS)] for i, n in enumerate(others)}


def _figure(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


# --- bars ---------------------------------------------------------------------------------------------------


def _bars(
    axes: Axes,
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
    cut = CUT * (values[0] or max(known, default=1.0))
    top = min(max(known, default=1.0), cut) or 1.0
    room = 1.2 * top
    for index, (name, value, label) in enumerate(zip(names, values, labels, strict=True)):
        end = 0.0
        if value is not None:
            spread = errors[index] if errors is not None else (0.0, 0.0)
            axes.barh(index, min(value, cut), height=0.62, color=colours[name])
            if value > cut:
                axes.text(0.94 * cut, index, "//", va="center", ha="center", color="white", fontweight="bold")
            elif errors is not None:
                # A whisker that would leave the figure is drawn as far as there is room for its label.
                above = max(0.0, min(spread[1], room - value))
                axes.errorbar(
                    value, index, xerr=[[min(spread[0], value)], [above]], color=ink, lw=1, capsize=2
                )
            end = cut if value > cut else min(value + spread[1], max(room, value))
        axes.text(end + 0.015 * top, index, label, va="center", ha="left").set_in_layout(False)
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, top * 1.62)
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"


def _panels(counts: Sequence[int]) -> tuple[Figure, list[Axes]]:
    """A figure with panels of bars one below the other, each as high as it has bars."""
    heights = [0.42 + 0.3 * count for count in counts]
    figure = _figure(0.1 + sum(heights))
    return figure, list(figure.subplots(len(counts), 1, squeeze=False, height_ratios=heights)[:, 0])


def _time_figure(record: Record) -> Figure | None:
    # Plans without numbers are named once, beside the training times.
    parts = {
        "training": list(record["plans"]),
        "inference": [row for row in record["plans"] if row["inference"]],
    }
    parts = {stage: rows for stage, rows in parts.items() if any(row[stage] for row in rows)}
    if not parts:
        return None
    figure, panels = _panels([len(rows) for rows in parts.values()])
    for axes, (stage, rows) in zip(panels, parts.items(), strict=True):
        timings = [row[stage] for row in rows]
        values = [t["step"]["median_s"] if t else None for t in timings]
        errors = [
            (t["step"]["median_s"] - t["step"]["q1_s"], t["step"]["q3_s"] - t["step"]["median_s"])
            if t
            else (0.0, 0.0)
            for t in timings
        ]
        labels = []
        for row, timing in zip(rows, timings, strict=True):
            if timing is None:
                labels.append(_why_not(row))
            else:
                speed = timing["speedup"]
                faster = f", {text.format_factor(speed['value'])}" if speed else ""
                labels.append(text.format_time(timing["step"]["median_s"]) + faster)
        title = "Time of a training step" if stage == "training" else "Time of an inference call"
        axes.set_title(title)
        _bars(axes, [row["name"] for row in rows], values, labels, _colours(record), errors)
    return figure


def _why_not(row: Record) -> str:
    if row["status"] == "stopped":
        return str(row["reason"])
    if row["status"] == "unsupported":
        return "cannot run here"
    return "not measured" if row["status"] == "ok" else str(row["status"])


def _memory_figure(record: Record) -> Figure | None:
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
    base = text.baseline(record)["memory"] or {}
    figure, panels = _panels([len(rows) for _, _, rows in parts])
    for axes, (key, title, rows) in zip(panels, parts, strict=True):
        values = [row["memory"][key] for row in rows]
        labels = []
        for row, value in zip(rows, values, strict=True):
            known = base.get(key) and row["name"] != record["baseline"]
            labels.append(text.format_bytes(value) + (f", {value / base[key] - 1:+.0%}" if known else ""))
        axes.set_title(title)
        _bars(axes, [row["name"] for row in rows], values, labels, _colours(record))
    return figure


# --- curves -------------------------------------------------------------------------------------------------


def curves_figure(
    curves: Mapping[str, Sequence[float | None]],
    *,
    title: str = "Loss",
    colours: Mapping[str, str] | None = None,
    steps: Sequence[float] | None = None,
) -> Figure:
    """Curves over training steps, on a logarithmic axis where they span more than a decade.

    Args:
        curves: A name and a value per step each; None leaves a gap.
        title: One line, above the axes.
        colours: Per name; by default the house's.
        steps: Step numbers of the values; by default 1, 2, 3 ...

    Returns:
        The figure.
    """
    with _style(_INK):
        figure = _figure(2.9)
        _curves(figure, curves, title, colours, steps)
    return figure


def _curves(
    figure: Figure,
    curves: Mapping[str, Sequence[float | None]],
    title: str,
    colours: Mapping[str, str] | None,
    steps: Sequence[float] | None,
) -> None:
    axes = figure.subplots()
    known = [v for values in curves.values() for v in values if v is not None]
    chosen = colours or {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(curves)}
    dashes = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))
    for index, (name, values) in enumerate(curves.items()):
        x = list(steps) if steps is not None else list(range(1, len(values) + 1))
        y = [float("nan") if v is None else v for v in values]
        axes.plot(
            x[: len(y)], y, color=chosen[name], lw=1.8, ls=dashes[index % len(dashes)], label=_short(name)
        )
    if known and min(known) > 0 and max(known) > 10 * min(known):
        from matplotlib.ticker import FuncFormatter, LogLocator

        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.grid(visible=True)
    if len(curves) > 1:
        if len(curves) <= 3:
            axes.legend(loc="upper right", fontsize=9)
        else:
            figure.legend(loc="outside lower center", fontsize=9, ncols=2)


def _loss_figure(record: Record) -> Figure | None:
    curves = {
        row["name"]: row["losses"] for row in record["plans"] if row["status"] == "ok" and row["losses"]
    }
    if not curves:
        return None
    figure = _figure(2.9)
    _curves(figure, curves, "Training loss", _colours(record), None)
    return figure


# --- pictures -----------------------------------------------------------------------------------------------


def _image_figure(record: Record) -> Figure | None:
    images = record.get("images") or {}
    if not images:
        return None
    columns = min(3, len(images))
    lines = -(-len(images) // columns)
    figure = _figure(0.2 + lines * (WIDTH / columns + 0.2))
    known = [x for line in images.get("target", next(iter(images.values()))) for x in line if x is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, (name, picture) in zip(grid.flat, images.items(), strict=False):
        rows = [[float("nan") if x is None else x for x in line] for line in picture]
        axes.imshow(rows, vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
        axes.set_title(_short(name), fontsize=8.5, fontweight="normal")
    return figure


# --- files --------------------------------------------------------------------------------------------------


def bench_figures(record: Record, ink: str = _INK) -> dict[str, Figure]:
    """Every picture that a bench's record has numbers for.

    Args:
        record: As ``BenchResult.to_dict`` gives it.
        ink: Colour of letters.

    Returns:
        Figures by name: ``time``, ``memory``, ``loss``, ``prediction``.
    """
    makers: dict[str, Callable[[Record], Figure | None]] = {
        "time": _time_figure, "memory": _memory_figure, "loss": _loss_figure, "prediction": _image_figure
    }  # fmt: skip
    with _style(ink):
        drawn = {name: make(record) for name, make in makers.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def to_svg(draw: Callable[[str], Figure], label: str) -> str:
    """An SVG to stand in a page, its letters in the page's own colour and font.

    Args:
        draw: Makes the figure with letters of a given colour.
        label: What a screen reader says of it.

    Returns:
        The ``<svg>`` element; the same for the same figure.
    """
    buffer = io.StringIO()
    with _style(_SENTINEL):
        draw(_SENTINEL).savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(_SENTINEL, "currentColor")
    svg = re.sub(r"font: (\d+ )?([\d.]+px) [^;\"]+", r"font: \1\2 inherit", svg)
    svg = re.sub(r'^<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    return re.sub(r'^<svg ([^>]*?)height="[^"]*"', rf'<svg role="img" aria-label="{label}" \1', svg, count=1)


def save_png(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure on white, at twice its nominal resolution.

    Returns:
        The path.
    """
    figure.savefig(path, dpi=200, facecolor="white", metadata={"Software": None})
    return Path(path)


def plot_curves(records: Sequence[Record], path: str | os.PathLike[str]) -> Path:
    """Draw a training run: its loss, and its loss scale below where there is one.

    Args:
        records: One mapping per step with ``step`` and ``loss``, perhaps ``loss_scale``; other keys are ignored.
        path: Of the PNG to write.

    Returns:
        The path.
    """
    steps = [record.get("step", index + 1) for index, record in enumerate(records)]
    scales = [record.get("loss_scale") for record in records]
    scaled = any(scale is not None for scale in scales)
    with _style(_INK):
        figure = _figure(4.6 if scaled else 2.9)
        parts: Sequence[Any] = [figure]
        if scaled:
            parts = list(figure.subfigures(2, 1, height_ratios=(3, 2), squeeze=False)[:, 0])
        _curves(parts[0], {"loss": [record.get("loss") for record in records]}, "Training loss", None, steps)
        if scaled:
            axes = parts[1].subplots()
            known = [(step, scale) for step, scale in zip(steps, scales, strict=True) if scale is not None]
            axes.step(*zip(*known, strict=True), where="post", color=_COLOURS[1], lw=1.8)
            axes.set_yscale("log", base=2)
            axes.set_title("Loss scale")
            axes.set_xlabel("step")
            axes.grid(visible=True)
        return save_png(figure, path)
