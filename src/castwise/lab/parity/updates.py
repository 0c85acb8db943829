"""Updates dropped by rounding, which stall a run whose parameters are stored low without masters.

The gradient test cannot detect this, since the gradients are correct.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core.casting.trees import to_device
from castwise.core.model.arrival import widen_
from castwise.core.plans.formats import FORMATS
from castwise.core.plans.plan import Plan
from castwise.lab.passes.isolation import seed_all

LOST = 0.5
"""A run stalls if the plan drops more than this share of the updates."""
WARM_STEPS = 4
"""Steps before the observed one: an optimizer's first step differs from later ones."""


def lost_updates(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Iterator[Any],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    plan: Plan,
    device: torch.device,
    seed: int = 0,
) -> float | None:
    """The share of elements with a nonzero update that rounding to their storage format drops.

    A copy of the model is trained in fp32 for a few steps; the last update is then added to the rounded weights.
    None for plans that do not store parameters low, or that keep masters.
    """
    if not plan.stores_low or plan.keeps_masters:
        return None
    dtype = FORMATS[plan.compute].dtype
    moved = lost = 0
    for _, old, update in one_update(model, loss, batches, optimizer, device, seed):
        changes = update != 0
        moved += int(changes.sum())
        if old.is_floating_point() and old.dtype is not torch.float64:  # plans store no other tensors low
            lost += int((changes & (stored_change(old, update, dtype) == 0)).sum())
    return lost / moved if moved else 0.0


def one_update(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batches: Iterator[Any],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    device: torch.device,
    seed: int = 0,
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Train a copy of the model in fp32 for a few steps; return name, weights and last update of each parameter."""
    copied = copy.deepcopy(model).to(device)
    widen_(copied)
    optim = optimizer(copied.parameters())
    before = []
    for step in range(WARM_STEPS + 1):
        batch = to_device(next(batches), device)
        seed_all(seed + step)
        before = [p.detach().clone() for p in copied.parameters()] if step == WARM_STEPS else []
        optim.zero_grad()
        loss(copied, batch).backward()
        optim.step()
    for (name, new), old in zip(copied.named_parameters(), before, strict=True):
        yield name, old, new.detach() - old


def stored_change(weights: Tensor, update: Tensor, dtype: torch.dtype) -> Tensor:
    """The change of weights stored in a format by an update: fp32, 0 where rounding drops it."""
    stored = weights.to(dtype).float()
    moved = (stored + update).to(dtype).float()
    return torch.where(moved == stored, 0.0, moved - stored)
