"""The class ``SyncBatchNorm``, in the module that defines it in an Apex built with its CUDA extensions."""

from __future__ import annotations

from castwise.bridges.compat.apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
