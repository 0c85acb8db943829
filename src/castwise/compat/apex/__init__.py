"""Apex, as far as training scripts use it.

``amp``: mixed precision. ``parallel``, ``optimizers``, ``normalization``, ``fp16_utils``, ``multi_tensor_apply``: what such
scripts import along with it, from torch. ``coverage``: which names there are.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel"]


def __getattr__(name: str) -> ModuleType:
    """Import a part of Apex when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return importlib.import_module(f"{__name__}.{name}")
