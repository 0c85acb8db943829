"""Compute statistics of a tensor's values; the functions that read values wait for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from castwise.core import _torch


@dataclass(frozen=True)
class Values:
    """Statistics of a tensor's values.

    Attributes:
        name: The name of the tensor, or of the operator's argument, such as ``self`` or ``weight``.
        dtype: The tensor's dtype, such as ``float16``.
        shape: The tensor's shape.
        low: The smallest finite value. None if no value is finite.
        high: The largest finite value. None if no value is finite.
        smallest: The smallest finite magnitude that is not 0. None if no value has such a magnitude.
        zeros: The number of zeros.
        nan: The number of NaNs.
        inf: The number of positive infinities.
        negative_inf: The number of negative infinities.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    smallest: float | None
    zeros: int
    nan: int
    inf: int
    negative_inf: int


def plain(tensor: Tensor) -> Tensor:
    """Return the numbers of a floating or complex tensor as a dense real tensor in a dtype that torch can compute in.

    A DTensor gives this rank's part, a complex tensor its real and imaginary parts, and an 8-bit tensor is widened to fp32.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "device_mesh"):
        tensor = _torch.distributed.local_tensor(tensor)
    tensor = _torch.tensors.dense_values(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def is_floating(tensor: Tensor) -> bool:
    """Whether a tensor's elements can be NaN or infinite."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_finite(tensor: Tensor) -> bool:
    """Whether all values of a floating tensor are finite."""
    with torch.no_grad():
        values = plain(tensor)
        if not values.numel() or values.is_meta:
            return True
        ends = torch.aminmax(values)  # one pass without a mask, and NaN propagates to both
        return math.isfinite(float(ends.min)) and math.isfinite(float(ends.max))


def has_nan(tensor: Tensor) -> bool:
    """Whether a floating tensor contains NaN."""
    with torch.no_grad():
        return bool(torch.isnan(plain(tensor)).any())


def values_of(name: str, tensor: Tensor) -> Values:
    """Return the statistics of a floating tensor."""
    with torch.no_grad():
        values = plain(tensor)
        finite = values[torch.isfinite(values)]
        sizes = finite.abs()
        sizes = sizes[sizes > 0]
        infinite = torch.isinf(values)
        return Values(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple((tensor if tensor.layout is torch.strided else values).shape),
            low=float(finite.min()) if finite.numel() else None,
            high=float(finite.max()) if finite.numel() else None,
            smallest=float(sizes.min()) if sizes.numel() else None,
            zeros=finite.numel() - sizes.numel(),
            nan=int(torch.isnan(values).sum()),
            inf=int(infinite.sum()),
            negative_inf=int((infinite & (values < 0)).sum()),
        )


def mend_(tensor: Tensor) -> None:
    """Replace non-finite values in place: negative infinities by -1, positive infinities and NaN by 1."""
    with torch.no_grad():
        target = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if hasattr(target, "device_mesh"):
            target = _torch.distributed.local_tensor(target)
        _torch.tensors.dense_values(target).copy_(
            torch.nan_to_num(plain(tensor), nan=1.0, posinf=1.0, neginf=-1.0)
        )
