"""Warn if a plan rounds a model's inputs so that distinct values become equal."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from castwise.core import _torch, devices
from castwise.core.casting.trees import tensors_in

_LOOKS = 3
_SAMPLE = 1 << 14


class RoundedInputs:
    """Checks the inputs of a model's first three calls before they are rounded, and warns once if values become equal.

    Only inputs that may be timesteps, positions or raw counts are compared. These are inputs with one number per
    example, and numbers so large that the format cannot represent every integer of their size. Features that are
    close to each other are no reason to warn. The checked calls wait for the device.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._looks = dtype, _LOOKS

    def look(self, kind: str, inputs: Any) -> bool:
        """Check the inputs of a call of a model of class ``kind``.

        Returns:
            Whether to check again at the next call.

        Warns:
            UserWarning: Distinct values become equal.
        """
        self._looks -= 1
        if _torch.dispatcher.in_transform() or devices.is_capturing():
            return self._looks > 0
        for tensor in tensors_in(inputs):
            if said := collapse(kind, tensor, self._dtype):
                warnings.warn(
                    f"{said}. Give timesteps, positions and other counts as integers, or use a plan that casts at operators, "
                    "such as 'bf16-mixed' and 'bf16-master'.",
                    stacklevel=3,
                )
                return False
        return self._looks > 0


def collapse(kind: str, tensor: Tensor, dtype: torch.dtype) -> str:
    """Say which distinct values of an input of a model of class ``kind`` become equal in ``dtype``; empty if none that matter."""
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout is not torch.strided:
        return ""
    if tensor.dtype not in (torch.float32, torch.float64):
        return ""
    pair = _that_collapse(tensor.detach(), dtype)
    if pair is None:
        return ""
    name = str(dtype).removeprefix("torch.")
    return (
        f"The plan rounds floating inputs of this {kind} to {name}, which makes distinct values of an input of shape "
        f"{list(tensor.shape)} equal: {pair[0]:.7g} and {pair[1]:.7g} become {float(tensor.new_tensor(pair[0]).to(dtype)):g}"
    )


def _that_collapse(values: Tensor, dtype: torch.dtype) -> tuple[float, float] | None:
    """Return two distinct values of a tensor that become equal in ``dtype``, or None if there are none that matter.

    In a tensor of several dimensions, only numbers matter that are larger than the integers that ``dtype`` represents
    exactly.
    """
    flat = values.reshape(-1)[:_SAMPLE]
    flat = flat[flat.to(dtype).isfinite()]  # overflow is not checked here
    if values.dim() > 1 or values.numel() == 1:
        flat = flat[flat.abs() >= 2 / torch.finfo(dtype).eps]
    flat = flat.sort().values
    low = flat.to(dtype)
    same = ((low[1:] == low[:-1]) & (flat[1:] != flat[:-1])).nonzero()
    if not len(same):
        return None
    index = int(same[0])
    return float(flat[index]), float(flat[index + 1])
