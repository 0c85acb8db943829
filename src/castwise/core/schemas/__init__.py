"""JSON Schemas of the files that castwise writes for others to read; they are package data beside this module.

They are made from the dataclasses by ``scripts/schemas.py``. A version's schema lets fields come to it; one that goes, or
changes its meaning, makes a new version.
"""

from __future__ import annotations

import importlib.resources
import json
from typing import Any, Final

from castwise.errors import UnknownNameError

__all__ = ["NAMES", "PLAN_VERSION", "RECORD_VERSION", "schema"]

NAMES: Final = ("plan", "evidence")
PLAN_VERSION: Final = 1
"""Version of ``plan.json``."""
RECORD_VERSION: Final = 1
"""Version of results: ``evidence.json``, ``bench.json``, ``result.json``."""


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a file that castwise writes.

    Args:
        name: ``plan``, of ``plan.json``, or ``evidence``, of ``evidence.json``.

    Raises:
        UnknownNameError: Another name.
    """
    if name not in NAMES:
        raise UnknownNameError(f"schema({name!r}): no such schema. Allowed: {', '.join(NAMES)}.")
    file = importlib.resources.files(__name__).joinpath(f"{name}.schema.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
