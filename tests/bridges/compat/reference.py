"""What the drop-in is compared with: loops written by hand, without castwise and without torch.amp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# Largest difference of a weight from a reference that does the same arithmetic, relative to the largest weight: the order
# of sums alone differs. And from one in fp64: what the format loses over the few steps of a test.
SAME_ARITHMETIC = 2e-6
FROM_FP64 = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(got: Iterable[Tensor], want: Iterable[Tensor], tolerance: float) -> None:
    """Assert that weights agree, each relative to the largest element of its own, or to 0.01 where all are smaller."""
    for mine, theirs in zip(got, want, strict=True):
        scale = float(theirs.detach().abs().max().clamp(min=1e-2))
        error = float((mine.detach().double() - theirs.detach().double()).abs().max())
        assert error <= tolerance * scale, (error, scale, tuple(mine.shape))


@dataclass
class Scale:
    """Dynamic loss scaling in eight lines."""

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
    """What a training left behind."""

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
    """O2 by hand: weights stored low, fp32 masters, SGD with momentum.

    Args:
        model: In fp32; stored low here, BatchNorm excepted.
        low: Format.
        batches: In fp32.
        loss_of: Called with a function that runs the model, and a batch.
        rate: Of SGD.
        momentum: Of SGD.
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
    """A plain loop in one format, which leaves out the steps that ``skips`` says.

    Args:
        dtype: fp64, mostly.
        model: Cast to it.
        batches: Cast to it.
        loss_of: As above.
        optimizer: Makes one from parameters.
        skips: One per batch.
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
    """How often a dynamic scale was halved."""
    return round(sum(max(0.0, math.log2(a / b)) for a, b in zip([first, *scales], scales, strict=False)))
