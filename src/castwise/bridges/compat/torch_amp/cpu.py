"""The names of ``torch.cpu.amp``, from castwise."""

from __future__ import annotations

import torch
from torch.cpu.amp import autocast_mode, grad_scaler

from castwise import Plan
from castwise.bridges.compat.torch_amp import DeviceAutocast, DeviceScaler

__all__ = ["GradScaler", "autocast"]


class autocast(DeviceAutocast, autocast_mode.autocast):  # noqa: N801 - as torch names it
    """A :class:`castwise.autocast` for the CPU, which casts to bf16 unless another ``dtype`` is given."""

    DEVICE = "cpu"
    # Torch's only names the arguments, and torch.compile does not trace it.
    __new__ = object.__new__  # type: ignore[assignment]

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype | Plan | str = torch.bfloat16,
        cache_enabled: bool = True,
    ) -> None:
        super().__init__(enabled, dtype, cache_enabled)


class _Torchs(grad_scaler.GradScaler):
    """Torch's class, with the arguments of ``torch.amp.GradScaler``."""

    __init__ = torch.amp.GradScaler.__init__


class GradScaler(DeviceScaler, _Torchs):
    """A :class:`castwise.GradScaler` for gradients on the CPU."""

    DEVICE = "cpu"
