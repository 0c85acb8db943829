"""``colossalai.context.parallel_mode``: the kinds of parallelism."""

from __future__ import annotations

from enum import Enum

__all__ = ["ParallelMode"]


class ParallelMode(Enum):
    """Kinds of parallelism, each with a process group."""

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    PARALLEL_1D = "1d"
