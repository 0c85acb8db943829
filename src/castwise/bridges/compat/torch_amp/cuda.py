"""The names of ``torch.cuda.amp``, from castwise."""

from __future__ import annotations

import functools

import torch

import castwise
from castwise import Plan
from castwise.bridges.compat.torch_amp import DeviceAutocast, DeviceScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]

custom_bwd = functools.partial(castwise.custom_bwd, device_type="cuda")
custom_fwd = functools.partial(castwise.custom_fwd, device_type="cuda")


class autocast(DeviceAutocast, torch.cuda.amp.autocast):  # noqa: N801 - as torch names it
    """A :class:`castwise.autocast` for CUDA, which casts to fp16 unless another ``dtype`` is given."""

    DEVICE = "cuda"
    # Torch's only names the arguments, and torch.compile does not trace it.
    __new__ = object.__new__  # type: ignore[assignment]

    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype | Plan | str = torch.float16,
        cache_enabled: bool = True,
    ) -> None:
        super().__init__(enabled, dtype, cache_enabled)


class _Torchs(torch.cuda.amp.GradScaler):
    """Torch's class, with the arguments of ``torch.amp.GradScaler``."""

    __init__ = torch.amp.GradScaler.__init__


class GradScaler(DeviceScaler, _Torchs):
    """A :class:`castwise.GradScaler` for gradients on CUDA."""

    DEVICE = "cuda"
