"""References for the drop-in: loops written by hand, without castwise and torch.amp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# Largest allowed difference of a weight, relative to the largest weight. SAME_ARITHMETIC: from a reference that differs
# only in the order of sums. FROM_FP64: from a reference in fp64, after the few steps of a test.
SAME_ARITHMETIC = 2e-6
FROM_FP64 = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(got: Iterable[Tensor], want: Iterable[Tensor], tolerance: float) -> None:
    """Assert that weights agree, relative to the largest element of each tensor, or to 0.01 if all are smaller."""
    for mine, theirs in zip(got, want, strict=True):
        scale = float(theirs.detach().abs().max().clamp(min=1e-2))
        error = float((mine.detach().double() - theirs.detach().double()).abs().max())
        assert error <= tolerance * scale, (error, scale, tuple(mine.shape))


@dataclass
class Scale:
    """Dynamic loss scaling, written by hand."""

    value: float = 2.0**16
    window: int = 2000
    clean: int = 0
    history: list[float] = field(default_factory=list)

    def move(self, overflow: bool) -> None:
        self.clean = 0 if overflow else self.clean + 1
        if overflow:
            self.value /= 2
        elif self.clean == self.window:
            self.value, self.clean = min(2.0**24, self.value * 2), 0
        self.history.append(self.value)


@dataclass
class Run:
    """The results of a training run."""

    weights: list[Tensor]
    scales: list[float]
    skips: list[bool]


def train_with_masters(
    model: nn.Module,
    low: torch.dtype,
    batches: list[Any],
    loss_of: Callable[..., Tensor],
    rate: float,
    momentum: float,
) -> Run:
    """Train like O2, by hand: weights stored low, fp32 masters, SGD with momentum.

    Args:
        model: A model in fp32; its weights except BatchNorm's are cast to ``low``.
        low: The low format.
        batches: Batches in fp32.
        loss_of: Function of the model's forward and a batch.
        rate: Learning rate of SGD.
        momentum: Momentum of SGD.
    """
    masters = [p.detach().clone() for p in model.parameters()]
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            for p in module.parameters(recurse=False):
                p.data = p.data.to(low)
    buffers = [torch.zeros_like(master) for master in masters]
    scale, skips, first = Scale(), [], True
    for batch in batches:
        model.zero_grad()
        loss = loss_of(lambda x: model(x.to(low)).float(), batch)
        (loss.float() * scale.value).backward()
        grads = [p.grad.float() / scale.value for p in model.parameters()]
        overflow = not all(bool(torch.isfinite(g).all()) for g in grads)
        scale.move(overflow)
        skips.append(overflow)
        if overflow:
            continue
        for p, master, buffer, grad in zip(model.parameters(), masters, buffers, grads, strict=True):
            buffer.copy_(grad if first else momentum * buffer + grad)
            master.sub_(rate * buffer)
            p.data.copy_(master)
        first = False
    return Run(masters, scale.history, skips)


def train_in(
    dtype: torch.dtype,
    model: nn.Module,
    batches: list[Any],
    loss_of: Callable[..., Tensor],
    optimizer: Any,
    skips: list[bool],
) -> list[Tensor]:
    """Train in a plain loop in one format, without the optimizer steps marked in ``skips``; return the weights.

    Args:
        dtype: The format, mostly fp64.
        model: The model, cast to ``dtype``.
        batches: The batches; inputs are cast to ``dtype``.
        loss_of: Function of the model's forward and a batch.
        optimizer: Function that makes the optimizer from parameters.
        skips: One boolean per batch.
    """
    model.to(dtype)
    update = optimizer(model.parameters())
    for batch, skip in zip(batches, skips, strict=True):
        update.zero_grad()
        loss_of(lambda x: model(x.to(dtype)), batch).backward()
        if not skip:
            update.step()
    return [p.detach() for p in model.parameters()]


def count_skips(scales: list[float], first: float = 2.0**16) -> int:
    """Return how often a dynamic loss scale was halved."""
    return round(sum(max(0.0, math.log2(a / b)) for a, b in zip([first, *scales], scales, strict=False)))
