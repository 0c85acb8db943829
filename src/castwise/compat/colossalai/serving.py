"""The original import lines, served from here: ``colossalai.amp`` is :mod:`castwise.compat.colossalai.amp`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

__all__ = ["serve", "served"]

_HERE = "castwise.compat.colossalai"
_PUBLIC = (
    "amp", "builder", "context", "core", "engine", "engine.gradient_accumulation", "engine.schedule", "initialize",
    "logging", "nn", "nn.lr_scheduler", "nn.metric", "nn.optimizer", "trainer", "trainer.hooks", "utils",
)  # fmt: skip
"""Modules under the names that scripts import them by."""


class _Absent(importlib.abc.MetaPathFinder):
    """Says what to use instead of a module that is not served; without it Python would look into this folder."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Raise for what is below ``colossalai``."""
        if fullname.startswith("colossalai.") and _serving():
            from castwise.compat.colossalai.coverage import instead_of

            raise ModuleNotFoundError(
                f"No module named {fullname!r}: castwise serves colossalai here. {instead_of(fullname)}",
                name=fullname,
            )


_absent = _Absent()


def _serving() -> bool:
    return getattr(sys.modules.get("colossalai"), "__name__", None) == _HERE


def _modules() -> dict[str, ModuleType]:
    found = {"colossalai": importlib.import_module(_HERE)}
    for name in _PUBLIC:
        found[f"colossalai.{name}"] = importlib.import_module(f"{_HERE}.{name}")
    for name, module in list(found.items()):  # where version 0.3 moved all of it
        found[name.replace("colossalai", "colossalai.legacy", 1)] = module
    return found


def _is_really_installed() -> bool:
    return "colossalai" in sys.modules or importlib.util.find_spec("colossalai") is not None


def serve() -> bool:
    """Enter the modules into ``sys.modules`` unless the real package is installed.

    Returns:
        Whether castwise serves ``colossalai``, now or already.
    """
    if _serving():
        return True
    if _is_really_installed():
        return False
    sys.modules.update(_modules())
    sys.meta_path.insert(0, _absent)
    return True


@contextlib.contextmanager
def served() -> Iterator[None]:
    """Serve ``colossalai`` for as long as the block runs, where nobody does: for configuration files."""
    if _serving() or not serve():
        yield
        return
    try:
        yield
    finally:
        sys.meta_path.remove(_absent)
        for name in _modules():
            sys.modules.pop(name, None)
