"""Provide the JSON Schemas of the files that castwise writes for other programs.

The schemas are stored as JSON files beside this module. ``scripts/schemas.py`` generates them from the dataclasses. New
fields may be added within a version; removing a field or changing its meaning needs a new version.
"""

from __future__ import annotations

import importlib.resources
import json
from typing import Any, Final

from castwise.errors import UnknownNameError

__all__ = ["NAMES", "PLAN_VERSION", "RECORD_VERSION", "schema"]

NAMES: Final = ("plan", "evidence")
PLAN_VERSION: Final = 1
"""The version of the format of ``plan.json``."""
RECORD_VERSION: Final = 1
"""The version of the format of result files: ``evidence.json``, ``bench.json`` and ``result.json``."""


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a file that castwise writes.

    Args:
        name: ``plan`` for the schema of ``plan.json``, or ``evidence`` for the schema of ``evidence.json``.

    Raises:
        UnknownNameError: ``name`` is neither of these.
    """
    if name not in NAMES:
        raise UnknownNameError(f"schema({name!r}): no such schema. Allowed: {', '.join(NAMES)}.")
    file = importlib.resources.files(__name__).joinpath(f"{name}.schema.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
