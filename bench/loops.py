"""The training loops that benchmarks compare: hand-written with torch.amp, and as in castwise's README."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import castwise
from castwise import Plan
from castwise.lab.workloads.workload import Workload

MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class Loop:
    """A training loop around a function that runs one step."""

    def __init__(self, step: Callable[[], torch.Tensor]) -> None:
        self.step = step
        self.losses: list[float] = []

    def before(self, steps: int) -> None:
        """Do nothing: the batch is fixed."""

    def run(self, steps: int) -> None:
        """Train for some steps."""
        for _ in range(steps):
            loss = self.step()
        self.losses.append(float(loss.detach()))

    def after(self) -> None:
        """Do nothing: there is nothing to clean up."""


def start(
    workload: Workload, device: torch.device, make_optimizer: MakeOptimizer | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, ...]]:
    """Return a model, an optimizer and a batch, with the same weights and data for every loop.

    The optimizer is the workload's, unless ``make_optimizer`` is given.
    """
    torch.manual_seed(0)
    model = workload.model().to(device)
    optimizer = (make_optimizer or workload.optimizer)(model.parameters())
    return model, optimizer, tuple(tensor.to(device) for tensor in next(iter(workload.batches(0))))


def training_by_hand(
    workload: Workload,
    device: torch.device,
    dtype: torch.dtype,
    make_optimizer: MakeOptimizer | None = None,
) -> Loop:
    """Return a loop with torch.autocast around forward and loss, and GradScaler in fp16; fp32 uses neither."""
    model, optimizer, batch = start(workload, device, make_optimizer)
    low = dtype is not torch.float32
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype if low else torch.bfloat16, enabled=low):
            loss = workload.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return Loop(step)


def training_by_castwise(
    workload: Workload,
    plan: Plan | str,
    device: torch.device,
    make_optimizer: MakeOptimizer | None = None,
    **options: Any,
) -> Loop:
    """Return the loop of the README; ``options`` are passed to :class:`castwise.Amp`."""
    model, optimizer, batch = start(workload, device, make_optimizer)
    amp = castwise.Amp(plan, device=device, **options)
    model, optimizer = amp.prepare(model, optimizer)
    return readme_loop(amp, optimizer, lambda: workload.loss(model, batch))


def readme_loop(
    amp: castwise.Amp, optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]
) -> Loop:
    """Return the loop of the README for a loss on a fixed batch."""

    def step() -> torch.Tensor:
        loss = loss_of()
        amp.backward(loss)
        amp.step(optimizer)
        optimizer.zero_grad()
        return loss

    return Loop(step)
