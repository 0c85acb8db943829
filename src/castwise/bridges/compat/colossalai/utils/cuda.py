"""``colossalai.utils.cuda``: helpers for the device of this process, which may be of any type."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from castwise.bridges.compat.coverage import missing_attribute
from castwise.core.casting import default_device_type

__all__ = ["empty_cache", "get_current_device", "set_to_cuda", "synchronize"]
__getattr__ = missing_attribute("colossalai.utils")


def get_current_device() -> torch.device:
    """Return the accelerator of this process, or the CPU if there is no accelerator."""
    kind = default_device_type()
    return (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )


def synchronize() -> None:
    """Wait until the device has finished its work."""
    if get_current_device().type != "cpu":
        torch.accelerator.synchronize()


def empty_cache() -> None:
    """Release the device memory that torch's allocator caches."""
    if get_current_device().type != "cpu":
        torch.accelerator.empty_cache()


def set_to_cuda(models: nn.Module | list[nn.Module]) -> Any:
    """Move a model, or each model of a list, to this process's device. For a list of one model, return that model."""
    if not isinstance(models, list):
        return models.to(get_current_device())
    moved = [model.to(get_current_device()) for model in models]
    return moved if len(moved) > 1 else moved[0]
