"""Plot log-probabilities: quantiles of the ratios, and the difference along a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from castwise.report.plots import COLOURS, GREY, Picture, Record, name_rows, new_figure, row_height

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _ratios(record: Record) -> Figure | None:
    """Plot the range of the ratios of each plan, and the clip range.

    A line reaches from the 0.1st to the 99.9th percentile. It is thicker from the 1st to the 99th, and from the 5th to the
    95th.
    """
    rows = record["serve"]
    if any(value is None for row in rows for value in row["ratio"].values()):
        return None
    names = [row["words"] for row in rows]
    figure = new_figure(0.9 + row_height(names, 0.35) * len(rows))
    axes = figure.subplots()
    for at, row in enumerate(rows):
        for low, high, width in (("0.001", "0.999", 1.5), ("0.01", "0.99", 4.0), ("0.05", "0.95", 8.0)):
            axes.plot(
                [row["ratio"][low], row["ratio"][high]],
                [at, at],
                color=COLOURS[at % len(COLOURS)],
                lw=width,
                solid_capstyle="butt",
            )
        axes.plot(row["ratio"]["0.5"], at, "|", color=COLOURS[at % len(COLOURS)], ms=14)
    for end in record["clip"]:
        axes.axvline(end, color=GREY, lw=1, ls=(0, (3, 2)))
    axes.set_title("Ratios train / serve per token")
    name_rows(axes, names)
    return figure


def _positions(record: Record) -> Figure | None:
    rows = [row for row in record["serve"] if len(row["by_position"]) > 1]
    if not rows:
        return None
    figure = new_figure(2.6)
    axes = figure.subplots()
    for at, row in enumerate(rows):
        heights = [float("nan") if value is None else value for value in row["by_position"]]
        ends = [100 * (place + 0.5) / len(heights) for place in range(len(heights))]
        axes.plot(ends, heights, color=COLOURS[at % len(COLOURS)], lw=1.8, label=row["words"])
    axes.set_ylim(bottom=0)
    axes.set_title("Difference along the sequence")
    axes.set_xlabel("position, % of the longest sequence")
    axes.set_ylabel("mean |log r|, nats")
    axes.grid(visible=True)
    if len(rows) > 1:
        axes.legend(fontsize=8)
    return figure


PICTURES = {
    "ratios": Picture(
        _ratios, "ratios of probabilities for each plan",
        "Lines: 99.8, 98 and 90 % of the tokens; dashed: the clip range.",
    ),
    "positions": Picture(
        _positions, "difference along the sequence", "An error that adds up along the context rises to the right."
    ),
}  # fmt: skip
