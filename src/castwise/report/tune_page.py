"""The page of a search: one HTML file that a person can decide from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from castwise.report import plots, text, tune_plots, tune_text
from castwise.report.page import render

__all__ = ["tune_page", "write_tune_page"]

_CAPTIONS = {
    "scatter": "Every plan whose speed and gradients were both measured, with 95 % intervals; right and down is better. Plans without both are in the table alone.",
    "gradients": "Gradients of the model's modules in fp32, per power of two, above what formats hold: pale where a "
    "format has fewer digits left, nothing where it has none. A loss scale moves fp16's range (dashed) down.",
    "gradients_by_region": "Where each region's gradients lie; width grows with the root of their number.",
    "regions": "Parts of the plan's damage, the relative error of an update, against the lines (dashed) that judge the whole of it.",
}
_LABELS = {
    "scatter": "Speed over fp32 against the damage of each plan",
    "gradients": "Histogram of gradient magnitudes with the ranges of formats",
    "gradients_by_region": "Gradient magnitudes of each region",
    "regions": "Bias and noise of each region",
}


def tune_page(record: Mapping[str, Any]) -> str:
    """The page of a search.

    Args:
        record: As ``TuneResult.to_dict`` gives it; what was not measured is None or empty and is left out.

    Returns:
        HTML with its style and pictures inside, for wide and narrow screens, light and dark.
    """
    rows = tune_text.plan_rows(record)
    figures = [
        {
            "svg": plots.to_svg(partial(_draw, record, name), _LABELS[name]),
            "caption": _CAPTIONS[name],
            "name": name,
        }
        for name in tune_plots.tune_figures(record)
    ]
    return render(
        "tune.html.j2",
        record=record,
        answer=tune_text.answer(record),
        remarks=tune_text.remarks(record),
        facts=tune_text.facts(record),
        kept=[row for row in rows if row.status != "rejected"],
        rejected=[row for row in rows if row.status == "rejected"],
        interval_note=tune_text.interval_note(record),
        figures=figures,
        regions=tune_text.region_rows(record),
        scale=tune_text.scale_sentences(record),
        verification=tune_text.verification_sentence(record),
        stages=tune_text.stage_rows(record),
        settings=tune_text.settings(record),
        command=record["command"] or record["environment"]["command"],
        where=text.where(record),
    )


def _draw(record: Mapping[str, Any], name: str, ink: str) -> Any:
    return tune_plots.tune_figures(record, ink)[name]


def write_tune_page(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the page and its pictures.

    Args:
        record: As ``TuneResult.to_dict`` gives it.
        folder: An existing folder.

    Returns:
        Paths: ``report.html`` first, then the PNG files.
    """
    page = folder / "report.html"
    page.write_text(tune_page(record), encoding="utf-8")
    figures = tune_plots.tune_figures(record)
    return [page, *(plots.save_png(figure, folder / f"{name}.png") for name, figure in figures.items())]
