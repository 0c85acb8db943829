"""Apex, as far as training scripts use it.

``amp``: mixed precision. ``parallel``, ``optimizers``, ``normalization``, ``fp16_utils``, ``multi_tensor_apply``: what
such scripts import along with it, on torch, by Apex's paths.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from castwise.bridges.compat.coverage import missing_attribute

PARTS: Final = ("amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
"""The modules that there are, each imported when it is first used."""
__all__ = list(PARTS)
_missing = missing_attribute("apex")


def __getattr__(name: str) -> ModuleType:
    """Import a part of Apex when it is first used."""
    if name not in PARTS:
        _missing(name)
    return importlib.import_module(f"{__name__}.{name}")
