"""Show a record as a table in the terminal, and as a page: one self-contained HTML file."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castwise.core.files import write_whole
from castwise.report import (
    bench,
    compare,
    doctor,
    forecast,
    mismatch,
    monitor,
    nonfinite,
    operators,
    outputs,
    parity,
    plots,
    recovery,
    replay,
    train,
    tried,
    tune,
    words,
)
from castwise.report.grids import WORDS, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

_KINDS = {
    "bench": bench, "compare": compare, "doctor": doctor, "forecast": forecast, "mismatch": mismatch,
    "monitor": monitor, "nonfinite": nonfinite, "operators": operators, "output-parity": outputs, "parity": parity,
    "recovery": recovery, "replay": replay, "train": train, "try": tried, "tune": tune,
}  # fmt: skip
"""The module that makes the text for each kind of record: ``lines`` and ``brief`` for the terminal, ``values`` and ``PICTURES``
for the page's template."""


def table(record: Mapping[str, Any], verbose: bool = True) -> RenderableType:
    """Return a record as text for ``rich.print``, readable from 80 columns on.

    Args:
        record: A record of any kind.
        verbose: Whether to show the whole record. If not, the answer and its evidence are shown, which fit on a screen.
    """
    kind = _KINDS[record["kind"]]
    lines = kind.lines if verbose else getattr(kind, "brief", kind.lines)
    return terminal(lines(record))


def page(record: Mapping[str, Any]) -> str:
    """Return the page of a record: one HTML file that contains its style and pictures.

    The page fits wide and narrow screens, light and dark. Values that were not measured are None or empty in the record, and
    are left out.
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
    environment.globals["words"] = WORDS
    kind = _KINDS[record["kind"]]
    pictures = [
        (name, plots.to_svg(figure, kind.PICTURES[name].label), kind.PICTURES[name].caption)
        for name, figure in plots.draw(kind.PICTURES, record, plots.SENTINEL).items()
    ]
    template = environment.get_template(f"{record['kind']}.html.j2")
    said: str = template.render(
        record=record, pictures=pictures, where=words.where(record), **kind.values(record)
    )
    return re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", said)  # a number and its sign stay on one line


def write(record: Mapping[str, Any], path: Path) -> list[Path]:
    """Write the page to ``path`` and its pictures as PNG files beside it; return all paths, the page's first."""
    write_whole(path, page(record), errors="backslashreplace")  # for paths with bytes that are not text
    figures = plots.draw(_KINDS[record["kind"]].PICTURES, record)
    return [
        path,
        *(plots.save_png(figure, path.with_name(f"{name}.png")) for name, figure in figures.items()),
    ]
