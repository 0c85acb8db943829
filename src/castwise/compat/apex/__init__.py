"""Apex, as far as training scripts use it.

``amp``: mixed precision. ``parallel``, ``optimizers``, ``normalization``, ``fp16_utils``, ``multi_tensor_apply``: what
such scripts import along with it, from torch.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Final

PARTS: Final = ("amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
"""The modules that there are, each imported when it is first used."""
__all__ = list(PARTS)


def __getattr__(name: str) -> ModuleType:
    """Import a part of Apex when it is first used."""
    if name not in PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(PARTS)}")
    return importlib.import_module(f"{__name__}.{name}")
