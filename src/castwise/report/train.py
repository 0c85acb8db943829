"""Show the result of a training, in one sentence and as curves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from castwise.core.plans.text import some
from castwise.report import words
from castwise.report.grids import Line
from castwise.report.plots import COLOURS, Record, draw_curves, new_figure, save_png, style


def lines(record: Mapping[str, Any]) -> list[Line]:
    """Return the result in one sentence, for the terminal."""
    return [Line(summary(record))]


def summary(record: Mapping[str, Any]) -> str:
    """Describe the result in one sentence."""
    where = f" on {record['layout']}" if record["world_size"] > 1 else ""
    said = f"{record['workload']} under {record['words']}{where}: loss {words.loss(record['final_loss'])}"
    said += f" after {record['steps_done']} steps ({record['steps_per_s']:.3g} steps/s"
    said += f", {record['steps_before']} of them before resuming" if record["steps_before"] else ""
    said += f", {record['skipped_steps']} skipped)" if record["skipped_steps"] else ")"
    if record["restored_buffers"]:
        said += f"; restored after skipped steps: {some([*record['restored_buffers']])}"
    return "; ".join([said, *(f"{key} {words.loss(value)}" for key, value in record["metrics"].items())])


def plot_curves(records: Sequence[Record], path: str | os.PathLike[str]) -> Path:
    """Draw a training's loss, and below it its loss scale if there is one, to a PNG file, and return the path of the file.

    Args:
        records: One mapping per step with ``step`` and ``loss``, and optionally ``loss_scale``. Other keys are ignored.
        path: Path of the file.
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
