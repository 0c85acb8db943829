"""``colossalai.context.parallel_mode``: the enum ``ParallelMode`` of kinds of parallelism."""

from __future__ import annotations

from enum import Enum

__all__ = ["ParallelMode"]


class ParallelMode(Enum):
    """A kind of parallelism, which has a process group of its own."""

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    PARALLEL_1D = "1d"
