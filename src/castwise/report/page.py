"""The page of a job: one HTML file that needs nothing beside it."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from castwise.report import plots, text

__all__ = ["bench_page", "render", "write_bench_page"]

_CAPTIONS = {
    "time": "Medians, whiskers from the first to the third quartile; shorter is faster. A bar with // is longer.",
    "memory": "Most that was allocated at once, each plan in a process of its own.",
    "loss": "Every plan started from the same weights and saw the same batches.",
    "prediction": "The target, and what each plan's model makes of it after training.",
}


def bench_page(record: Mapping[str, Any]) -> str:
    """The page of a bench.

    Args:
        record: As ``BenchResult.to_dict`` gives it.

    Returns:
        HTML with its style and pictures inside, for wide and narrow screens, light and dark.
    """
    figures = [
        {
            "svg": plots.to_svg(partial(_draw, record, name), f"{name} of each plan"),
            "caption": _CAPTIONS[name],
            "name": name,
        }
        for name in plots.bench_figures(record)
    ]
    return render(
        "bench.html.j2",
        record=record,
        headline=text.headline(record),
        grids=text.grids(record),
        notes=text.notes(record),
        interval_note=text.interval_note(record),
        where=text.where(record),
        figures=figures,
        parts=_parts,
    )


def render(template: str, **values: Any) -> str:
    """Fill a template of this room.

    Args:
        template: Its file name; it may extend ``base.html.j2``, which holds what all pages share.
        values: What it names; a name that is missing is an error.

    Returns:
        HTML.
    """
    import jinja2

    room = importlib.resources.files("castwise.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: room.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def _parts(cell: str) -> list[str]:
    """A cell cut where a narrow screen may break it: before its brackets, or anywhere in a sentence."""
    if "(" in cell:
        return [cell[: cell.index("(")].strip(), cell[cell.index("(") :]]
    return cell.split() if cell.count(" ") > 2 else [cell]


def _draw(record: Mapping[str, Any], name: str, ink: str) -> Any:
    return plots.bench_figures(record, ink)[name]


def write_bench_page(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the page and its pictures.

    Args:
        record: As ``BenchResult.to_dict`` gives it.
        folder: An existing folder.

    Returns:
        Paths: ``bench.html`` first, then the PNG files.
    """
    page = folder / "bench.html"
    page.write_text(bench_page(record), encoding="utf-8")
    pictures = [
        plots.save_png(figure, folder / f"{name}.png") for name, figure in plots.bench_figures(record).items()
    ]
    return [page, *pictures]
