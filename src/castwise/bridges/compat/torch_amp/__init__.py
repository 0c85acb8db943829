"""castwise's autocast and GradScaler with the arguments of ``torch.cuda.amp`` and ``torch.cpu.amp``, which name no device.

``cuda`` and ``cpu`` have the names of these modules. Their classes pass ``isinstance`` for castwise's and for torch's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

import castwise
from castwise import Plan

__all__ = ["DeviceAutocast", "DeviceScaler"]


class DeviceAutocast(castwise.autocast):
    """A :class:`castwise.autocast` for one type of device, with the arguments of ``torch.cuda.amp.autocast``.

    Args:
        enabled: Whether operators are cast. In a block with False, nothing is cast.
        dtype: The dtype to which operators are cast, as in torch. A plan, or the name of a preset or format, is
            accepted too.
        cache_enabled: Whether the bf16 or fp16 copies of fp32 weights are kept and reused until the outermost block
            ends.
    """

    DEVICE: ClassVar[str]

    def __init__(self, enabled: bool, dtype: torch.dtype | Plan | str, cache_enabled: bool) -> None:
        if isinstance(dtype, torch.dtype):
            super().__init__(self.DEVICE, dtype, enabled, cache_enabled)
        else:
            super().__init__(dtype, None, enabled, cache_enabled, device_type=self.DEVICE)


class DeviceScaler(castwise.GradScaler):
    """A :class:`castwise.GradScaler` for one type of device, with the arguments of ``torch.cuda.amp.GradScaler``.

    The keyword arguments ``extras`` are those arguments of :class:`castwise.GradScaler` that torch's class does not
    have.
    """

    DEVICE: ClassVar[str]

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **extras: Any,
    ) -> None:
        super().__init__(
            self.DEVICE, init_scale, growth_factor, backoff_factor, growth_interval, enabled, **extras
        )
