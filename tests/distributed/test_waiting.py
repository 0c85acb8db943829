"""A waiting rank names the ranks it waits for."""

from __future__ import annotations

import contextlib
import datetime
import re
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import castwise
from castwise.core import checkpoint
from castwise.core.ranks import waiting
from castwise.core.ranks.waiting import Waiting
from tests.distributed.world import World


@contextlib.contextmanager
def hurry() -> Iterator[list[warnings.WarningMessage]]:
    """Shorten the delays of the messages; yield the recorded warnings."""
    former = waiting.POSTED_AFTER_S, waiting.SAID_AFTER_S, waiting._ALIVE_S
    waiting.POSTED_AFTER_S, waiting.SAID_AFTER_S, waiting._ALIVE_S = 0.2, 1.2, 0.6
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield said
    finally:
        waiting.POSTED_AFTER_S, waiting.SAID_AFTER_S, waiting._ALIVE_S = former


def training() -> tuple[castwise.Amp, nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(4, 4)
    amp = castwise.Amp("fp16-mixed", device="cpu")
    return amp, net, torch.optim.SGD(net.parameters(), 0.1)


def late(rank: int, size: int, where: str, folder: str) -> list[str]:
    """Delay rank 1 by two seconds."""
    amp, net, optimizer = training()
    with hurry() as said:
        if rank == 1 and where == "prepare":
            time.sleep(2.0)
        amp.prepare(net, optimizer)
        for step in range(2):
            amp.backward(net(torch.ones(2, 4)).square().mean())
            if rank == 1 and where in ("step", "save") and step == 1:
                time.sleep(2.0)
            if rank == 2 and where == "step" and step == 1:
                amp.unscale_(optimizer)
            elif where != "save" or step == 0:
                amp.step(optimizer)
        if where == "save":
            checkpoint.save(folder, 1, model=net, optimizers=optimizer, amp=amp)
    amp.close()
    return [str(warning.message) for warning in said if warning.category is UserWarning]


@pytest.mark.parametrize("where", ["prepare", "step", "save"])
def test_a_rank_that_waits_names_who_has_not_come(four: World, where: str, tmp_path: Any) -> None:
    first, second, third, _ = four.run(late, where, str(tmp_path))
    assert second == []
    (text,) = first
    assert text.startswith(f"{where}: rank 0 has waited 1.2 s for rank 1, which has not made this call")
    assert ("; rank 2 waits in unscale_ (test_waiting.py, line " in text) == (where == "step")
    assert "All ranks of a session must make the same calls" in text
    assert [re.match(r"\w+: rank 2 has waited 1.2 s for rank 1,", text) is not None for text in third] == [
        True
    ]


def short(rank: int, size: int) -> list[str]:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    if rank == 1:
        time.sleep(3.0)
        return []

    def wait() -> None:
        with Waiting(group):
            dist.all_reduce(torch.ones(()), group=group)

    with hurry():
        warnings.simplefilter("error")  # must not raise on the thread that checks
        with pytest.raises(RuntimeError) as failed:
            wait()
    return list(failed.value.__notes__)


def test_torchs_own_timeout_says_it_too(two: World) -> None:
    notes, none = two.run(short)
    assert none == []
    assert [note.partition(",")[0] for note in notes] == ["step: rank 0 has waited 1.2 s for rank 1"]


def quick(rank: int, size: int) -> int:
    amp, net, optimizer = training()
    with hurry() as said:
        amp.prepare(net, optimizer)
        for _ in range(30):
            amp.backward(net(torch.ones(2, 4)).square().mean())
            amp.step(optimizer)
            time.sleep(0.05)
    amp.close()
    return len([one for one in said if "has waited" in str(one.message)])


def test_ranks_that_come_together_say_nothing(two: World) -> None:
    assert two.run(quick) == [0, 0]
