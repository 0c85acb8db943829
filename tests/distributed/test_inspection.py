"""Tools that look at a model, on several ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from castwise import first_nonfinite

from .world import World


def _on_one_rank(rank: int, size: int, wrapped: bool) -> Any:
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    if wrapped:
        model = DistributedDataParallel(model)
    batch = torch.ones(2, 4)
    if rank == size - 1:
        batch[1, 2] = math.nan
    found = first_nonfinite(model, lambda m, b: m(b).square().mean(), batch)
    return found.origin, found.name, found.ranks, all(p.grad is None for p in model.parameters())


def test_what_one_rank_alone_has_is_told_on_all(two: World) -> None:
    for wrapped in (False, True):
        assert two.run(_on_one_rank, wrapped) == [("data", "batch", (1,), True)] * 2
