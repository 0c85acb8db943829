"""Names of Apex that castwise has not: importing them says what to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__all__ = ["missing"]


def missing(module: str, instead: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` for what it has not.

    Args:
        module: Its name.
        instead: What to use, by the name that is missing.
    """

    def lookup(name: str) -> NoReturn:
        if name in instead:
            raise ImportError(f"cannot import name {name!r} from {module!r}: {instead[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return lookup
