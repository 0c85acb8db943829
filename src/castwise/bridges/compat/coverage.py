"""The coverage of a drop-in: every public name of the original with its status, from ``coverage.toml``."""

from __future__ import annotations

import functools
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from opcode import opmap
from types import FrameType
from typing import Any, Final, Literal, NoReturn, get_args

__all__ = ["STATUSES", "Covered", "Status", "covered", "instead", "missing_attribute"]

Status = Literal["works", "differs", "absent"]
STATUSES: Final[tuple[Status, ...]] = get_args(Status)
"""``works``: as in the original. ``differs``: available with another behaviour; the note says what differs and why.
``absent``: using it raises, and the note says what to use instead."""


@dataclass(frozen=True)
class Covered:
    """One public name of the original.

    Attributes:
        name: As a script writes it, from the package on: ``apex.amp.initialize``; an argument is
            ``apex.amp.initialize(opt_level)``, and ``module.*`` stands for everything else in the original's module.
        status: One of `STATUSES`.
        note: What differs and why, or what to use instead. May be empty for ``works``. Markdown, one line, no ``|``.
    """

    name: str
    status: Status
    note: str = ""


@functools.cache
def covered(package: str) -> tuple[Covered, ...]:
    """Every public name of ``apex`` or ``colossalai``, in the order in which docs list them."""
    text = resources.files(__package__).joinpath(package, "coverage.toml").read_text(encoding="utf-8")
    parts = {name: said.partition(": ") for name, said in tomllib.loads(text).items()}
    return tuple(Covered(name, status, note) for name, (status, _, note) in parts.items())


def instead(*names: str, inside: str = "") -> str:
    """The replacement of an absent name: the note of the nearest absent row, for the name or for what contains it.

    If there is none, the first such row of what is ``inside`` a module; empty if there is none either.
    """
    rows = {row.name: row for row in covered(names[0].partition(".")[0]) if row.status == "absent"}
    nearest = (around for name in names for around in _outwards(name))
    within = (name for name in rows if inside and f"{name}.".startswith(f"{inside}."))
    found = next((rows[name] for name in (*nearest, *within) if name in rows), None)
    return "" if found is None else found.note.replace("`", "")


def _outwards(name: str) -> Iterator[str]:
    """A name, then what contains it: ``a.b``, the rest of ``a``, ``a``."""
    while name:
        yield name
        name = name.rpartition(".")[0]
        yield f"{name}.*"


def missing_attribute(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module, such as ``apex.optimizers``: an error that says what to use instead.

    It is an AttributeError, so that ``hasattr`` is False, except for ``from module import name``, whose own message
    would replace it: there it is an ImportError.
    """

    def lookup(name: str) -> NoReturn:
        note = "" if name.startswith("_") else instead(f"{module}.{name}")
        message = f"{module!r} of castwise.compat has no {name!r}"
        if not note:
            raise AttributeError(f"{message}; docs/compat.md lists what is available")
        message = f"{message}. Instead: {note}."
        caller = sys._getframe(1)
        while caller.f_code.co_name == "__getattr__" and caller.f_back is not None:
            caller = caller.f_back
        if _imports(caller):
            raise ImportError(message, name=module)
        raise AttributeError(message)

    return lookup


def _imports(caller: FrameType) -> bool:
    """Whether a frame reads an attribute for ``from module import name``: itself, or the import system for a package."""
    if caller.f_code.co_name == "_handle_fromlist":
        return True
    return caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]
