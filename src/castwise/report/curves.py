"""Curves over training steps: of a training, and of the plans of a bench."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise.report.plots import COLOURS, Record, cut, new_figure, save_png, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

__all__ = ["draw_curves", "plot_curves"]


def draw_curves(
    figure: Figure | SubFigure,
    curves: Mapping[str, Sequence[float | None]],
    colours: Mapping[str, str],
    steps: Sequence[float] | None = None,
) -> None:
    """Draw losses over training steps, on a logarithmic axis where they span more than a decade.

    Args:
        figure: Where to.
        curves: A name and a loss per step each; None leaves a gap.
        colours: Per name.
        steps: Step numbers of the losses; by default 1, 2, 3 ...
    """
    axes = figure.subplots()
    known = [v for values in curves.values() for v in values if v is not None]
    dashes = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))
    for index, (name, values) in enumerate(curves.items()):
        x = list(steps) if steps is not None else list(range(1, len(values) + 1))
        y = [float("nan") if v is None else v for v in values]
        axes.plot(
            x[: len(y)], y, color=colours[name], lw=1.8, ls=dashes[index % len(dashes)], label=cut(name)
        )
    if known and min(known) > 0 and max(known) > 10 * min(known):
        from matplotlib.ticker import LogLocator

        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title("Training loss")
    axes.set_xlabel("step")
    axes.grid(visible=True)
    if 1 < len(curves) <= 3:
        axes.legend(loc="upper right", fontsize=9)
    elif len(curves) > 3:
        figure.legend(loc="outside lower center", fontsize=9, ncols=2)


def plot_curves(records: Sequence[Record], path: str | os.PathLike[str]) -> Path:
    """Draw a training: its loss, and its loss scale below where there is one.

    Args:
        records: One mapping per step with ``step`` and ``loss``, perhaps ``loss_scale``; other keys are ignored.
        path: Of the PNG to write.

    Returns:
        The path.
    """
    steps = [record.get("step", index + 1) for index, record in enumerate(records)]
    scales = [
        (x, scale)
        for x, record in zip(steps, records, strict=True)
        if (scale := record.get("loss_scale")) is not None
    ]
    with style():
        figure = new_figure(4.6 if scales else 2.9)
        parts: Sequence[Any] = [figure]
        if scales:
            parts = list(figure.subfigures(2, 1, height_ratios=(3, 2), squeeze=False)[:, 0])
        draw_curves(
            parts[0], {"loss": [record.get("loss") for record in records]}, {"loss": COLOURS[0]}, steps
        )
        if scales:
            axes = parts[1].subplots()
            axes.step(*zip(*scales, strict=True), where="post", color=COLOURS[1], lw=1.8)
            axes.set_yscale("log", base=2)
            axes.set_title("Loss scale")
            axes.set_xlabel("step")
            axes.grid(visible=True)
        return save_png(figure, path)
