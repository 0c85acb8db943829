"""Replaces NVIDIA Apex, as far as training scripts use it.

``amp`` implements mixed precision. ``parallel``, ``optimizers``, ``normalization``, ``fp16_utils`` and
``multi_tensor_apply`` are further modules of Apex that such scripts import. They are implemented with torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

from castwise.bridges.compat.coverage import missing_attribute

PARTS: Final = ("amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
"""The modules of Apex that castwise replaces. Each is imported at its first use."""
__all__ = list(PARTS)
_missing = missing_attribute("apex")


def __getattr__(name: str) -> ModuleType:
    """Import a module of :data:`PARTS` when it is first used."""
    if name not in PARTS:
        _missing(name)
    return importlib.import_module(f"{__name__}.{name}")
