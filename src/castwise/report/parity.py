"""What the parity test found, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from castwise.report import words
from castwise.report.grids import Grid, Row, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["parity_table"]


def parity_table(answer: str, modules: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The finding and the worst modules, for ``rich.print``.

    Args:
        answer: Plan, verdict and reason.
        modules: As ``dataclasses.asdict`` makes them of :class:`~castwise.numerics.parity.RegionParity`.

    Returns:
        Something rich can print.
    """
    from rich.console import Group
    from rich.text import Text

    rows = []
    for module in modules:
        numbers = (module[key] for key in ("bias", "noise", "data_noise", "adam"))
        rows.append(Row((module["path"] or "(model)", *("" if n is None else f"{n:.2g}" for n in numbers))))
    header = ("module", "bias", "noise", "data's noise", "in Adam's steps")
    return Group(Text(answer), "", terminal(Grid("", header, tuple(rows))), "", f"Damage is {words.MEANING}.")
