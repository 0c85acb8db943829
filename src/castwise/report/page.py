"""The page of a job: one HTML file that needs nothing beside it."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise.report import plots, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["pictures", "render", "write"]


def render(template: str, record: Mapping[str, Any], figures: list[dict[str, str]], **values: Any) -> str:
    """Fill a template of this room.

    Args:
        template: Its file name; it extends ``base.html.j2``, which holds what all pages share.
        record: As a result's ``to_dict`` gives it.
        figures: As :func:`pictures` gives them.
        values: What the template names besides; a name that is missing is an error.

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
    filled = environment.get_template(template)
    return filled.render(record=record, figures=figures, where=words.where(record), **values)


def pictures(
    draw: Callable[[Mapping[str, Any], str], Mapping[str, Figure]],
    record: Mapping[str, Any],
    words: Mapping[str, tuple[str, str]],
) -> list[dict[str, str]]:
    """Pictures for a page, their letters in its own colour.

    Args:
        draw: Makes figures by name of a record, with letters of a given colour.
        record: What to draw.
        words: By name: what a screen reader says of a picture, and what stands below it.
    """
    return [
        {"name": name, "svg": plots.to_svg(figure, words[name][0]), "caption": words[name][1]}
        for name, figure in draw(record, plots.SENTINEL).items()
    ]


def write(path: Path, page: str, figures: Mapping[str, Figure]) -> list[Path]:
    """Write a page, and its figures as PNG files beside it.

    Returns:
        Their paths, the page's first.
    """
    path.write_text(page, encoding="utf-8")
    return [
        path,
        *(plots.save_png(figure, path.with_name(f"{name}.png")) for name, figure in figures.items()),
    ]
