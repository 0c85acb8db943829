"""``apex.multi_tensor_apply``: imported by many scripts, called by few."""

from __future__ import annotations

from castwise.bridges.compat.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
