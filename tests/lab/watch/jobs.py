"""Small training runs with state that a monitor could disturb: dropout, BatchNorm, momentum."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise
from tests.here import DEVICE

Batch = tuple[Tensor, Tensor]


def model(seed: int = 0, dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 32), nn.LayerNorm(32),
        nn.Linear(32, 4),
    )  # fmt: skip


def batches(count: int = 6, seed: int = 1) -> list[Batch]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    out = []
    for _ in range(count):
        inputs = torch.randn(16, 16, generator=generator)
        out.append((inputs, inputs[:, :4] * 2 + inputs[:, 4:8]))
    return out


def loss(net: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(net(batch[0]), batch[1])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 1e-2),
    "fused adamw": lambda params: torch.optim.AdamW(params, 1e-2, fused=True),
    "for loop": lambda params: torch.optim.RMSprop(params, 1e-3, eps=1e-4, foreach=False),
    "lbfgs": lambda params: torch.optim.LBFGS(params, 1e-1, max_iter=3),
}


def generators() -> tuple[Any, ...]:
    device = None if DEVICE == "cpu" else torch.get_device_module(DEVICE).get_rng_state().clone()
    return torch.get_rng_state().clone(), device, random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, so that NaN equals NaN and 0 differs from -0."""
    return tensor.detach().contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor


def same(one: Any, other: Any) -> bool:
    """Return True if two trees of tensors and plain values are bitwise equal."""
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor) and one.dtype is other.dtype and torch.equal(*map(_bits, (one, other)))
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def train(
    amp: castwise.Amp,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    accumulate: int = 1,
    poison: Any = (),
    by_hand: bool = False,
    after: Callable[[int], object] = lambda step: None,
) -> None:
    """Train; the loss is infinite in the ``poison`` steps; with ``by_hand``, call ``optimizer.step()`` directly."""
    data = batches()
    for step in range(1, steps + 1):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            value = torch.zeros(())
            for micro in range(accumulate):
                value = loss(net, data[(step + micro) % len(data)]) / accumulate
                if step in poison:
                    value = value * torch.tensor(float("inf"))
                amp.backward(value)
            return value

        if isinstance(optimizer, torch.optim.LBFGS):
            amp.step(optimizer, closure=closure)
        else:
            closure()
            if by_hand:
                amp.unscale_(optimizer)
                optimizer.step()
            else:
                amp.step(optimizer)
        after(step)
