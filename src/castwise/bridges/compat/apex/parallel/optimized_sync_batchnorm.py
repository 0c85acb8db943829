"""``apex.parallel.optimized_sync_batchnorm``: where Apex with compiled code has the class."""

from __future__ import annotations

from castwise.bridges.compat.apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
