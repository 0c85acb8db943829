"""Reads ``coverage.toml``, which says of every public name of Apex or Colossal-AI whether castwise replaces it, and how."""

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
"""``works``: the name behaves as in the original library. ``differs``: the name is available but behaves differently, and
its note says how and why. ``absent``: using the name raises an error, and its note says what to use instead."""


@dataclass(frozen=True)
class Covered:
    """One public name of the original library (Apex or Colossal-AI), and what castwise's replacement does for it.

    Attributes:
        name: The full name, beginning with the package: ``apex.amp.initialize``. An argument is written
            ``apex.amp.initialize(opt_level)``. ``module.*`` stands for all names of the module that are not listed.
        status: One of `STATUSES`.
        note: What differs and why, or what to use instead. It is one line of Markdown without ``|``, and may be empty for
            ``works``.
    """

    name: str
    status: Status
    note: str = ""


@functools.cache
def covered(package: str) -> tuple[Covered, ...]:
    """Return what castwise's replacement does for each public name of a package, in the order of the documentation.

    Args:
        package: ``"apex"`` or ``"colossalai"``.
    """
    text = resources.files(__package__).joinpath(package, "coverage.toml").read_text(encoding="utf-8")
    parts = {name: said.partition(": ") for name, said in tomllib.loads(text).items()}
    return tuple(Covered(name, status, note) for name, (status, _, note) in parts.items())


def instead(*names: str, inside: str = "") -> str:
    """Return the text that says what to use instead of a name that castwise does not replace.

    The text is the note of the name's own ``absent`` row in ``coverage.toml``, or that of the nearest class or module
    around the name. If no such row exists, the text is the note of the first ``absent`` row in the module ``inside``. If
    that does not exist either, the text is empty.
    """
    rows = {row.name: row for row in covered(names[0].partition(".")[0]) if row.status == "absent"}
    nearest = (around for name in names for around in _outwards(name))
    within = (name for name in rows if inside and f"{name}.".startswith(f"{inside}."))
    found = next((rows[name] for name in (*nearest, *within) if name in rows), None)
    return "" if found is None else found.note.replace("`", "")


def _outwards(name: str) -> Iterator[str]:
    """Yield a dotted name, then each name that contains it. For ``a.b.c`` it begins ``a.b.c``, ``a.b.*``, ``a.b``, ``a.*``."""
    while name:
        yield name
        name = name.rpartition(".")[0]
        yield f"{name}.*"


def missing_attribute(module: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module such as ``apex.optimizers``, whose errors say what to use instead.

    The error is an AttributeError, so that ``hasattr`` returns False. For ``from module import name``, Python would replace
    the message of an AttributeError. There the error is therefore an ImportError.
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
    """Whether a stack frame is reading an attribute for the statement ``from module import name``.

    The frame is that of the statement itself or, for a package, that of Python's import system.
    """
    if caller.f_code.co_name == "_handle_fromlist":
        return True
    return caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]
