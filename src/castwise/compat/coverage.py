"""How a drop-in says what it has: every public name of the original, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

__all__ = ["STATUSES", "Covered", "Status"]

Status = Literal["works", "differs", "absent"]
STATUSES: Final[tuple[Status, ...]] = get_args(Status)
"""``works``: as in the original. ``differs``: it is there and does something else, which the note says and why.
``absent``: using it raises, and the note says what to use instead."""


@dataclass(frozen=True)
class Covered:
    """One name of an original's contract.

    Attributes:
        name: As a script writes it, from the package down: ``apex.amp.initialize``; an argument is
            ``apex.amp.initialize(opt_level)``.
        status: One of `STATUSES`.
        note: What differs and why, or what to use instead. May be empty for ``works``. Markdown, one line, no ``|``.

    Raises:
        ValueError: A status that is none, or a note that is missing or would break the table.
    """

    name: str
    status: Status
    note: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"Covered({self.name!r}, {self.status!r}): allowed: {', '.join(STATUSES)}")
        if self.status != "works" and not self.note:
            raise ValueError(
                f"Covered({self.name!r}, {self.status!r}): say in the note what to expect instead"
            )
        if "|" in self.note or "\n" in self.note:
            raise ValueError(f"Covered({self.name!r}): the note is a cell of a table: one line, no '|'")
