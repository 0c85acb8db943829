"""Plot the error along a model's forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from castwise.report.plots import COLOURS, GREY, Picture, Record, new_figure, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED = 3
"""Largest number of calls that are named in a plot."""
_TICKS, _APART = 9, 0.045
"""Largest number of calls that the axis names, and the smallest gap between two of them, as a fraction of the axis."""
_DECADES = 6.0
"""Number of decades that a plot shows below its largest error."""


def label(call: Record) -> str:
    """Return the name of a call: the path of its module and, from the second call of the module on, its number."""
    name = call["path"] or "(model)"
    return f"{name} (call {call['call']})" if call["call"] else str(name)


def _path(record: Record, direction: str) -> Figure | None:
    """Plot the errors of calls in the order in which the calls ended.

    For each call the plot shows the error, the error that the call adds by itself, and the error that rounding explains.
    """
    calls = [call for call in _by_end(record["calls"]) if call[direction]["error"] is not None]
    if not any(call[direction]["error"] for call in calls):
        return None
    figure = new_figure(3.6)
    axes = figure.subplots()
    top = max(value for call in calls for key in ("error", "own") if (value := call[direction][key]))
    least = min(
        value for call in calls for key in ("error", "own", "expected") if (value := call[direction][key])
    )
    floor = max(top / 10**_DECADES, least / 2)

    def heights(key: str) -> list[float]:
        known = [call[direction][key] for call in calls]
        return [max(value, floor) if value else float("nan") for value in known]

    places = range(len(calls))
    axes.plot(places, heights("error"), color=COLOURS[0], lw=1.6, label="error")
    axes.plot(places, heights("expected"), color=GREY, lw=1.0, ls=(0, (3, 2)), label="explained by rounding")
    colours = [COLOURS[6] if call[direction]["effect"] == "born" else COLOURS[2] for call in calls]
    axes.scatter(places, heights("own"), c=colours, s=10, zorder=3, label="own")
    axes.set_yscale("log")
    born = any(call[direction]["effect"] == "born" for call in calls)
    axes.set_ylim(floor / 4, top * (30 if born else 4))  # room for the legend and the names
    axes.grid(visible=True, axis="y")
    axes.set_title(f"{direction.capitalize()}: how the error develops")
    axes.set_xlabel(
        "calls, in the order in which they end"
        if direction == "forward"
        else "calls; backward goes from right to left"
    )
    ticks = _ticks([call["path"] for call in calls])
    axes.set_xticks(
        ticks, [plain(_short(calls[at]["path"])) for at in ticks], rotation=40, ha="right", fontsize=8
    )
    axes.tick_params(axis="x", pad=1)
    axes.set_ylabel("relative error")
    axes.legend(loc="lower right", fontsize=8, ncols=3)
    _name(axes, calls, direction)
    return figure


def _by_end(calls: Sequence[Record]) -> list[Record]:
    """Sort calls from the order in which they begin to the order in which they end: a module comes after the modules in it."""
    out: list[Record] = []
    running: list[Record] = []
    for call in calls:
        while running and not _is_inside(call["path"], running[-1]["path"]):
            out.append(running.pop())
        running.append(call)
    return [*out, *reversed(running)]


def _ticks(paths: Sequence[str]) -> list[int]:
    """Return the positions of the calls that the axis names: the innermost modules at the deepest level that fits."""
    called = set(paths)
    levels = [sum(path[:at] in called for at, letter in enumerate(path) if letter == ".") for path in paths]
    chosen: list[int] = []
    for deepest in (3, 2, 1, 0):
        kept = [at for at, path in enumerate(paths) if levels[at] <= deepest and path not in ("", "(loss)")]
        outer = {paths[at][:end] for at in kept for end, letter in enumerate(paths[at]) if letter == "."}
        chosen = [at for at in kept if paths[at] not in outer]
        if len(chosen) <= _TICKS:
            break
    spaced: list[int] = []
    for at in chosen[:: math.ceil(len(chosen) / _TICKS) or 1]:
        if not spaced or at - spaced[-1] >= _APART * len(paths):
            spaced.append(at)
    return spaced


def _short(path: str, most: int = 14) -> str:
    """Return the last parts of a path, as many as fit. A number is never without the part before it."""
    first, *rest = reversed(path.split("."))
    name = first
    for at, part in enumerate(rest):
        if len(name) + len(part) >= most and not (at == 0 and first.isdecimal()):
            break
        name = f"{part}.{name}"
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _is_inside(path: str, outer: str) -> bool:
    return outer in ("", "(loss)") or path.startswith(f"{outer}.")


def _name(axes: Axes, calls: Sequence[Record], direction: str) -> None:
    """Write the names of the calls in which errors arise beside their points."""
    born = [at for at, call in enumerate(calls) if call[direction]["effect"] == "born"]
    worst = sorted(born, key=lambda at: -(calls[at][direction]["excess"] or float("inf")))[:_NAMED]
    for step, at in enumerate(sorted(worst)):
        right = at > len(calls) / 2
        axes.annotate(
            plain(_short(label(calls[at]), 24)), (at, calls[at][direction]["own"] or axes.get_ylim()[0]),
            xytext=(-4 if right else 4, 8 + 11 * step), textcoords="offset points", ha="right" if right else "left", fontsize=8, color=COLOURS[6],
        ).set_in_layout(False)  # fmt: skip


def _forward(record: Record) -> Figure | None:
    return _path(record, "forward")


def _backward(record: Record) -> Figure | None:
    return _path(record, "backward")


_CAPTION = (
    "A dot is the error that a call adds by itself; the dashed line is what rounding to its format explains. An error arises "
    "at red dots, which are far above the dashed line. Where the solid line is above the dots, the error comes from earlier "
    "calls."
)
PICTURES = {
    "forward": Picture(_forward, "error of each call, forward", _CAPTION),
    "backward": Picture(_backward, "error of each call, backward", _CAPTION),
}
