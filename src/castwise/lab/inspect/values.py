"""Statistics of a tensor's values; each function waits for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from castwise.core import _torch


@dataclass(frozen=True)
class Values:
    """Statistics of a tensor.

    Attributes:
        name: Its name, or the operator's argument name: ``self``, ``weight``.
        dtype: Its dtype, such as ``float16``.
        shape: Its sizes.
        low: The smallest finite value, None without any.
        high: The largest finite value.
        smallest: The smallest magnitude that is not 0, None without any.
        zeros: Number of zeros.
        nan: Number of NaNs.
        inf: Number of infinities.
        negative_inf: Number of negative infinities.
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
    """The numbers of a floating or complex tensor: real, dense, local to this rank, in a format that torch computes in."""
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
    """Statistics of a floating tensor."""
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
    """Replace non-finite values: by -1 for negative infinities, else by 1."""
    with torch.no_grad():
        target = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if hasattr(target, "device_mesh"):
            target = _torch.distributed.local_tensor(target)
        _torch.tensors.dense_values(target).copy_(
            torch.nan_to_num(plain(tensor), nan=1.0, posinf=1.0, neginf=-1.0)
        )
