"""``apex.normalization.fused_layer_norm``, implemented with torch's layer norm and RMS norm.

The argument ``memory_efficient`` is ignored everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]

_Shape = int | Sequence[int] | torch.Size


def _as_shape(shape: _Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


class _Fused:
    def __init__(
        self,
        normalized_shape: _Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)  # type: ignore[call-arg]


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """``torch.nn.LayerNorm`` with Apex's arguments."""


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """``torch.nn.RMSNorm`` with Apex's arguments."""


class _Mixed:
    def __init__(self, normalized_shape: _Shape, eps: float = 1e-5, **kwargs: Any) -> None:
        if not kwargs.get("elementwise_affine", True):
            raise RuntimeError(f"{type(self).__name__} does not support `elementwise_affine = False`")
        super().__init__(normalized_shape, eps)  # type: ignore[call-arg]


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """A layer norm whose input and weights may have different dtypes. The result has the weights' dtype.

    Raises:
        RuntimeError: ``elementwise_affine=False``.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply layer norm to ``input``."""
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """An RMS norm whose input and weights may have different dtypes. The result has the weights' dtype.

    Raises:
        RuntimeError: ``elementwise_affine=False``.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply RMS norm to ``x``."""
        return mixed_dtype_fused_rms_norm_affine(x, self.weight, self.normalized_shape, self.eps or 0.0)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: _Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Apply layer norm with weights. The input and the weights must have the same dtype."""
    return layer_norm(input, _as_shape(normalized_shape), weight, bias, eps)


def fused_layer_norm(
    input: Tensor, normalized_shape: _Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Apply layer norm without weights."""
    return layer_norm(input, _as_shape(normalized_shape), None, None, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: _Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Apply layer norm to an input of any floating dtype, in fp32, and return the result in the weights' dtype."""
    out = fused_layer_norm_affine(input.float(), weight.float(), bias.float(), normalized_shape, eps)
    return out.to(weight.dtype)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: _Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Apply RMS norm with weights. The input and the weights must have the same dtype."""
    return rms_norm(input, _as_shape(normalized_shape), weight, eps)


def fused_rms_norm(
    input: Tensor, normalized_shape: _Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Apply RMS norm without weights."""
    return rms_norm(input, _as_shape(normalized_shape), None, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: _Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Apply RMS norm to an input of any floating dtype, in fp32, and return the result in the weights' dtype."""
    return fused_rms_norm_affine(input.float(), weight.float(), normalized_shape, eps).to(weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: _Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Apply RMS norm, with or without weights. Apex uses this name for its reference implementation."""
    if weight is None:
        return fused_rms_norm(input, normalized_shape, eps)
    return mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps)


class FusedLayerNormAffineFunction:
    """Stands in for Apex's autograd Function of this name: its ``apply`` is :func:`fused_layer_norm_affine`."""

    forward = apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormFunction:
    """Stands in for Apex's autograd Function of this name: its ``apply`` is :func:`fused_layer_norm`."""

    forward = apply = staticmethod(fused_layer_norm)
