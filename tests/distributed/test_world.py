"""The basis of the other tests in this folder: a failure on one rank fails its test and no later one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.distributed.world import World


@pytest.fixture
def world() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


def total(rank: int, size: int) -> float:
    numbers = torch.tensor([float(rank + 1)])
    dist.all_reduce(numbers)
    return float(numbers)


def fails(rank: int, size: int) -> None:
    assert rank == 0, "planted"
    dist.barrier()


def dies(rank: int, size: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


def hangs(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(600)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (fails, "rank 1: Traceback.*AssertionError: planted"),
        (dies, "rank 1: the process has ended"),
        (hangs, r"ranks \[0, 1\] have not answered in 1 s"),
    ],
)
def test_a_fault_fails_its_case_and_no_later_one(world: World, fault: Callable[..., None], said: str) -> None:
    assert world.run(total) == [3.0, 3.0]
    world.patience_s = 1.0 if fault is hangs else 60.0
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        world.run(fault)
    world.patience_s = 60.0
    assert world.run(total) == [3.0, 3.0]
