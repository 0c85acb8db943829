"""The names that the drop-ins in ``castwise.compat`` have, read from their source (which is not run) and lists."""

from __future__ import annotations

import functools
import symtable
from collections.abc import Mapping
from importlib import resources

from castwise.bridges.compat.coverage import Covered, covered, instead

LIBRARIES = ("apex", "colossalai")
"""Libraries that have a drop-in."""
_OF_ANY_MODULE = {
    "__dict__",
    "__doc__",
    "__file__",
    "__loader__",
    "__name__",
    "__package__",
    "__path__",
    "__spec__",
}


def library_of(dotted: str) -> str:
    """The library of a dotted name."""
    return dotted.partition(".")[0]


def here(dotted: str) -> str:
    """A library's name as in its drop-in: version 0.3 of Colossal-AI moved its parts to ``legacy``."""
    parts = dotted.split(".")
    return ".".join(parts[:1] + parts[2:]) if parts[:2] == ["colossalai", "legacy"] else dotted


def is_module(dotted: str) -> bool:
    """Whether the drop-in has a module of this name."""
    return _bound(dotted) is not None


def home(module: str, name: str) -> str:
    """The module of the drop-in that provides ``from module import name``; empty if there is none.

    Names of a library's module that the drop-in lacks are also exported by the package around it.
    """
    module = _nearest(module)
    return module if name in (_bound(module) or ()) or is_module(f"{module}.{name}") else ""


def _nearest(module: str) -> str:
    """The module, or the nearest package around it that exists."""
    while not is_module(module) and module.count(".") > 1:
        module = module.rpartition(".")[0]
    return module


def serves(module: str, name: str = "") -> bool:
    """Whether ``import module``, or ``from module import name``, works with the drop-in."""
    if name in ("", "*"):
        return is_module(here(module))
    return bool(home(here(module), name)) or is_module(here(f"{module}.{name}"))


def imported(dotted: str) -> str:
    """The drop-in's object for an imported name; empty if it does not exist."""
    module, _, name = dotted.rpartition(".")
    if is_module(dotted):
        return dotted
    found = home(module, name)
    return f"{found}.{name}" if found else ""


def lacks(dotted: str) -> str:
    """The first module in a chain of attributes that the drop-in lacks; empty if it has all of them."""
    at, *parts = dotted.split(".")
    for part in parts:
        names, at = _bound(at) or {}, f"{at}.{part}"
        inside = _bound(at)
        if part in _OF_ANY_MODULE:
            return ""
        if part in names and (inside is None or inside.get(part)):
            return ""  # not a module, although a module may have the same name
        if inside is None:
            return at
    return ""


@functools.cache
def _bound(module: str) -> Mapping[str, bool] | None:
    """The names that a module of a drop-in binds, and whether it defines them; None if there is no such module."""
    base = resources.files("castwise.bridges.compat")
    path = module.replace(".", "/")
    for file in (base.joinpath(f"{path}.py"), base.joinpath(path, "__init__.py")):
        if file.is_file():
            table = symtable.symtable(file.read_text(encoding="utf-8"), module, "exec")
            return {
                name.get_name(): name.is_assigned()
                for name in table.get_symbols()
                if name.is_assigned() or name.is_imported()
            }
    return None


def row(dotted: str) -> Covered | None:
    """The entry of a name in the list, or of an argument as in ``apex.amp.initialize(verbosity)``.

    A name with its full path, as ``apex.optimizers.fused_adam.FusedAdam``, is listed under the package around it.
    """
    rows = covered(library_of(dotted)) if library_of(dotted) in LIBRARIES else ()
    name, *argument = dotted.partition("(")
    module, _, last = name.rpartition(".")
    package = module.rpartition(".")[0]
    names = [dotted, "".join([package, ".", last, *argument])] if "." in package else [dotted]
    return next((each for name in names for each in rows if each.name == name), None)


def lacking(part: str, dotted: str) -> str:
    """A note that a drop-in lacks a part of a dotted name, with a replacement."""
    module, _, name = dotted.rpartition(".")
    note = instead(dotted, f"{_nearest(module)}.{name}", inside=part)
    absent = [each.name for each in covered(library_of(part)) if each.status == "absent"]
    listed = [each for each in absent if f"{dotted}.".startswith(f"{each}.")]
    part = max([part, *listed], key=len)
    return f"castwise.compat has no {part}: {note or 'docs/compat.md lists what is available'}"
