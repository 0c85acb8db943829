"""Models in which one layer rounds too coarsely, under autocast only. A comparison must find that layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.here import DEVICE


def coarse(tensor: Tensor, bits: int) -> Tensor:
    """Round to the nearest value with ``bits`` bits of mantissa after the leading one."""
    mantissa, exponent = torch.frexp(tensor.float())
    scale = 2.0 ** (bits + 1)
    return torch.ldexp(torch.round(mantissa * scale) / scale, exponent).to(tensor.dtype)


class Coarse(torch.autograd.Function):
    """The identity, with coarse rounding in either the forward or the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, bits: int, backward: bool) -> Tensor:
        ctx.bits, ctx.coarse = bits, backward
        return tensor.clone() if backward else coarse(tensor, bits)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return coarse(gradients[0], ctx.bits) if ctx.coarse else gradients[0], None, None


class Layer(nn.Module):
    """A residual layer: norm, linear, GELU, linear. ``fault`` is ``(place, bits, backward)``.

    The place is ``out``, the output of the second linear layer, or ``sum``, the residual sum in ``Layer.forward``.
    """

    def __init__(self, width: int, fault: tuple[str, int, bool] | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 2 * width)
        self.second = Product(2 * width, width, fault if fault and fault[0] == "out" else None)
        self.fault = fault if fault and fault[0] == "sum" else None

    def forward(self, x: Tensor) -> Tensor:
        added = self.second(functional.gelu(self.first(self.norm(x))))
        return _spoilt(x + added, self.fault)


class Product(nn.Linear):
    def __init__(self, inside: int, out: int, fault: tuple[str, int, bool] | None) -> None:
        super().__init__(inside, out)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return _spoilt(super().forward(x), self.fault)


def _spoilt(x: Tensor, fault: tuple[str, int, bool] | None) -> Tensor:
    if fault is None or not torch.is_autocast_enabled(x.device.type):
        return x
    return Coarse.apply(x, fault[1], fault[2])  # type: ignore[no-any-return, no-untyped-call]


class Stack(nn.Module):
    """A stack of residual layers, with a fault in layer ``at``."""

    def __init__(self, layers: int = 24, width: int = 32, at: int | None = None, fault: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.take = nn.Linear(8, width)
        self.layers = nn.ModuleList(Layer(width, fault if i == at else None) for i in range(layers))
        self.give = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.take(x)
        for layer in self.layers:
            x = layer(x)
        return self.give(x)  # type: ignore[no-any-return]


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(16, 8, generator=draw), torch.randint(4, (16,), generator=draw)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])
