"""Define what all plots share: their style and colours, and how they become SVG in the page's colours, or PNG files.

A figure is drawn at the width of a phone, so that its text stays legible there. If a page has room, it puts several figures
side by side.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from castwise.core.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Record = Mapping[str, Any]

WIDTH = 4.2
"""Width of a figure in inches: at 100 units per inch about the width of a phone."""
_INK = "#1b1f24"
SENTINEL = "#010203"
"""Colour of text in figures that become SVG. It is later replaced by the page's text colour."""
GREY = "#8a8f98"
COLOURS = ("#2f6fde", "#e0872b", "#2a9d74", "#c2479c", "#7a5bd6", "#b8a01f", "#d1495b", "#3aa6c9")


@contextlib.contextmanager
def style(ink: str = _INK) -> Iterator[None]:
    """Apply castwise's matplotlib settings inside the ``with`` block, with text of the colour ``ink``."""
    import matplotlib

    settings: dict[Any, Any] = {
        "font.size": 9.5, "font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "castwise",
        "axes.edgecolor": GREY, "axes.labelcolor": ink, "axes.titlesize": 10.5, "axes.titleweight": "bold",
        "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "text.color": ink,
        "axes.titlecolor": ink, "xtick.color": GREY, "ytick.color": GREY, "xtick.labelcolor": ink,
        "ytick.labelcolor": ink, "axes.linewidth": 0.8, "legend.frameon": False, "legend.labelcolor": ink,
        "axes.grid": False, "grid.color": GREY, "grid.alpha": 0.25, "figure.facecolor": "none",
        "axes.facecolor": "none", "savefig.facecolor": "none",
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        yield


def new_figure(height: float) -> Figure:
    """Return an empty figure of the standard width. Its height is in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


class Picture(NamedTuple):
    """A plot for one kind of record.

    Attributes:
        draw: Makes the figure; None if a record has no numbers for it.
        label: Text for a screen reader.
        caption: Text below the plot.
    """

    draw: Callable[[Record], Figure | None]
    label: str
    caption: str


def draw(pictures: Mapping[str, Picture], record: Record, ink: str = _INK) -> dict[str, Figure]:
    """Draw every plot for which a record has numbers, with text of the colour ``ink``, and return the figures by name."""
    if not pictures:
        return {}  # without importing matplotlib
    with style(ink):
        drawn = {name: picture.draw(record) for name, picture in pictures.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def plain(text: str) -> str:
    """Escape a user's text so that matplotlib draws it literally, because a dollar sign would start a formula."""
    return text.replace("$", r"\$")


def folded(name: str, most: int = 18) -> str:
    """Break a name into lines short enough for an axis, before a dot, a plus or an equals sign if possible."""
    rows = [""]
    for part in re.split(r"(?=[.+=])", name):
        pieces = [part[at : at + most] for at in range(0, len(part), most)]
        for piece in pieces:
            if rows[-1] and len(rows[-1] + piece) > most:
                rows.append(piece)
            else:
                rows[-1] += piece
    return plain("\n".join(rows))


def row_height(names: Sequence[str], height: float) -> float:
    """Return the inches per row, if a row of one line takes ``height`` and some names are folded into more lines."""
    return height + 0.15 * max((folded(name).count("\n") for name in names), default=0)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows at 0, 1, 2 ... with their names, from top to bottom."""
    axes.set_yticks(range(len(names)), [folded(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def name_decades(axes: Axes, values: Sequence[float]) -> None:
    """Label a logarithmic axis in plain numbers. If it spans few decades, label positions between them too."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.yaxis.set_major_formatter("{x:g}")
    if max(values) < 1000 * min(values):
        axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.yaxis.set_minor_formatter(NullFormatter())


def draw_curves(
    figure: Figure | SubFigure,
    curves: Mapping[str, Sequence[float | None]],
    colours: Mapping[str, str],
    steps: Sequence[float] | None = None,
) -> None:
    """Draw losses over training steps, on a logarithmic axis if they span more than a decade.

    Args:
        figure: The figure to draw in.
        curves: For each name, a loss per step; None leaves a gap.
        colours: For each name, the colour of its curve.
        steps: Step numbers of the losses; by default 1, 2, 3 ...
    """
    axes = figure.subplots()
    known = [v for values in curves.values() for v in values if v is not None]
    dashes = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))
    for index, (name, values) in enumerate(curves.items()):
        x = list(steps) if steps is not None else list(range(1, len(values) + 1))
        y = [float("nan") if v is None else v for v in values]
        axes.plot(
            x[: len(y)], y, color=colours[name], lw=1.8, ls=dashes[index % len(dashes)], label=folded(name)
        )
    if known and min(known) > 0 and max(known) > 10 * min(known):
        axes.set_yscale("log")
        name_decades(axes, known)
    axes.set_title("Training loss")
    axes.set_xlabel("step")
    axes.grid(visible=True)
    if 1 < len(curves) <= 3:
        axes.legend(loc="upper right", fontsize=9)
    elif len(curves) > 3:
        figure.legend(loc="outside lower center", fontsize=9, ncols=2)


def to_svg(figure: Figure, label: str) -> str:
    """Return a figure as an ``<svg>`` element, with its text in the page's colour and font.

    The figure must have been drawn in ``SENTINEL``. Equal figures give equal text. A screen reader reads ``label``.
    """
    buffer = io.StringIO()
    with style(SENTINEL):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(SENTINEL, "currentColor")
    svg = re.sub(r"font: (\d+ )?([\d.]+px) [^;\"]+", r"font: \1\2 inherit", svg)
    svg = re.sub(r'^<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1)
    return re.sub(r'^<svg ([^>]*?)height="[^"]*"', rf'<svg role="img" aria-label="{label}" \1', svg, count=1)


def save_png(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure on white as a PNG file, at twice its nominal resolution, and return the path."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    write_whole(Path(path), buffer.getvalue())
    return Path(path)
