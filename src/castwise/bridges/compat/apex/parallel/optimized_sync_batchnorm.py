"""``apex.parallel.optimized_sync_batchnorm``: the path of the class in a compiled Apex."""

from __future__ import annotations

from castwise.bridges.compat.apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
