"""``apex.normalization`` on torch's norm layers, which are fused where the device can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "FusedLayerNorm",
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


def _check_affine(name: str, options: dict[str, Any]) -> None:
    if not options.get("elementwise_affine", True):
        raise RuntimeError(f"{name} does not support `elementwise_affine = False`")


class FusedLayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm``; ``memory_efficient`` is ignored."""

    def __init__(
        self,
        normalized_shape: _Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_as_shape(normalized_shape), eps, elementwise_affine)


class FusedRMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm``; ``memory_efficient`` is ignored."""

    def __init__(
        self,
        normalized_shape: _Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_as_shape(normalized_shape), eps, elementwise_affine)


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer norm of inputs in any format by weights in any other; the result has the weights' format.

    Args:
        normalized_shape: Trailing dimensions.
        eps: Added to the denominator, under its root.
        kwargs: ``memory_efficient``, which is ignored; ``elementwise_affine`` may only be True.

    Raises:
        RuntimeError: ``elementwise_affine=False``.
    """

    def __init__(self, normalized_shape: _Shape, eps: float = 1e-5, **kwargs: Any) -> None:
        _check_affine("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMS norm of inputs in any format by weights in any other; the result has the weights' format.

    Args:
        normalized_shape: Trailing dimensions.
        eps: Added to the denominator, under its root.
        kwargs: ``memory_efficient``, which is ignored; ``elementwise_affine`` may only be True.

    Raises:
        RuntimeError: ``elementwise_affine=False``.
    """

    def __init__(self, normalized_shape: _Shape, eps: float = 1e-5, **kwargs: Any) -> None:
        _check_affine("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        return mixed_dtype_fused_rms_norm_affine(x, self.weight, self.normalized_shape, self.eps or 0.0)


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: _Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer norm with weights, all of one format."""
    return functional.layer_norm(input, _as_shape(normalized_shape), weight, bias, eps)


def fused_layer_norm(
    input: torch.Tensor, normalized_shape: _Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Layer norm without weights."""
    return functional.layer_norm(input, _as_shape(normalized_shape), None, None, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: _Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Layer norm of an input in any format; computed in fp32, returned in the weights' format."""
    out = functional.layer_norm(input.float(), _as_shape(normalized_shape), weight.float(), bias.float(), eps)
    return out.to(weight.dtype)


def fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: _Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS norm with weights, all of one format."""
    return functional.rms_norm(input, _as_shape(normalized_shape), weight, eps)


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: _Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """RMS norm without weights."""
    return functional.rms_norm(input, _as_shape(normalized_shape), None, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: _Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """RMS norm of an input in any format; computed in fp32, returned in the weights' format."""
    out = functional.rms_norm(input.float(), _as_shape(normalized_shape), weight.float(), eps)
    return out.to(weight.dtype)


def manual_rms_norm(
    input: torch.Tensor, normalized_shape: _Shape, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """RMS norm, by the name of Apex's reference."""
    if weight is None:
        return fused_rms_norm(input, normalized_shape, eps)
    return mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps)
