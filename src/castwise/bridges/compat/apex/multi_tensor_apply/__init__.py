"""``apex.multi_tensor_apply``, which can be imported but not called: many scripts import it, and few call it."""

from __future__ import annotations

from castwise.bridges.compat.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
