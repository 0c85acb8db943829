"""The regions a search may decide about, found in a model's module tree.

A *unit* is a module that computes something itself, or modules of one structure at the same place of repeated blocks
(``blocks.*.norm``): identical blocks share one probe and one timing.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Unit"]


@dataclass(frozen=True)
class Unit:
    """A region of a model, as a search sees it.

    Attributes:
        pattern: As a plan's region names it; matches exactly ``paths``.
        kind: Class name of its modules.
        paths: Module paths, in the model's order.
        parameters: Elements in the parameters that are its modules' own (not their children's).
        inner: Patterns of units inside it. Where a unit has some, the unit itself is what its modules' ``forward``
            computes beside calling them.
    """

    pattern: str
    kind: str
    paths: tuple[str, ...]
    parameters: int
    inner: tuple[str, ...] = ()
