"""A plain fp32 training loop for the tests of workloads."""

from __future__ import annotations

import torch
from torch import nn

from castwise import Workload


def train(workload: Workload, steps: int, seed: int = 0) -> tuple[nn.Module, list[float]]:
    """Train in fp32.

    Args:
        workload: The workload to train.
        steps: Number of optimizer steps.
        seed: Seed for weights and data.

    Returns:
        The model and the loss of every step.
    """
    torch.manual_seed(seed)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    batches, losses = workload.batches(seed), []
    for _ in range(steps):
        loss = workload.loss(model, next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses
