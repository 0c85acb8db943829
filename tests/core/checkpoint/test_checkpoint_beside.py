"""Finding the newest checkpoint while another process or thread saves."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.core import checkpoint
from castwise.errors import CheckpointError
from tests.here import DEVICE
from tests.processes import forks

LOOKS_S = 0.7


def save_again_and_again(folder: Path, keep: int, same_step: bool, ended: Callable[[], bool]) -> None:
    """Save complete checkpoints in a loop, starting with step 5, until ``ended()``."""
    torch.set_default_device(DEVICE)  # the default device is set per thread
    torch.set_num_threads(1)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with castwise.Amp("fp32", device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        step = 5
        while not ended():
            checkpoint.save(folder, step, model=model, optimizers=optimizer, amp=amp, keep=keep)
            step += not same_step


def _process(folder: Path, keep: int, same_step: bool, ended: Any) -> None:
    save_again_and_again(folder, keep, same_step, ended.is_set)


@pytest.mark.parametrize(("keep", "same_step"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("kind", ["process", "thread"])
def test_there_is_always_one(tmp_path: Path, kind: str, keep: int, same_step: bool) -> None:
    """A complete checkpoint is always found, without a warning about damaged or interrupted saves."""
    ended: Any
    if kind == "process":
        context = forks()
        ended = context.Event()
        saver: Any = context.Process(target=_process, args=(tmp_path, keep, same_step, ended), daemon=True)
    else:
        ended = threading.Event()
        saver = threading.Thread(target=save_again_and_again, args=(tmp_path, keep, same_step, ended.is_set))
    saver.start()
    try:
        deadline = time.monotonic() + 60
        while not [*tmp_path.glob("step-*")] and time.monotonic() < deadline:
            time.sleep(0.01)
        looks, last, steps = 0, 5, set()
        until = time.monotonic() + LOOKS_S
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            while time.monotonic() < until:
                found = checkpoint.newest(tmp_path)
                assert found.step >= last
                assert {passed.reason for passed in found.skipped} <= {"is being saved"}
                last = found.step
                steps.add(last)
                looks += 1
    finally:
        ended.set()
        saver.join(60)
    assert looks > 3
    assert len(steps) > 1 or same_step


def test_what_was_found_and_is_gone_is_said(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with castwise.Amp("fp32", device=DEVICE) as amp:
        amp.prepare(model)
        checkpoint.save(tmp_path, 1, model=model, amp=amp)
        found = checkpoint.newest(tmp_path)
        checkpoint.save(tmp_path, 2, model=model, amp=amp, keep=1)
        with pytest.raises(CheckpointError, match="does not exist; a later save may have deleted it"):
            checkpoint.load(found, model=model, amp=amp)


def _waits(folder: Path, begun: Any, ended: Any) -> None:
    """Save one complete checkpoint, then start one that takes long."""
    from castwise.core.checkpoint import storage

    torch.set_num_threads(1)
    model = nn.Linear(4, 4)
    amp = castwise.Amp("fp32", device=DEVICE)
    amp.prepare(model)
    checkpoint.save(folder, 1, model=model, amp=amp)
    write = storage.Stage.write

    def slowly(stage: Any, path: Path) -> Any:
        begun.set()
        ended.wait(60)
        return write(stage, path)

    storage.Stage.write = slowly  # type: ignore[method-assign]
    checkpoint.save(folder, 2, model=model, amp=amp)


def test_a_save_that_goes_on_is_not_called_interrupted_and_one_that_was_killed_is(tmp_path: Path) -> None:
    context = forks()
    begun, ended = context.Event(), context.Event()
    saver = context.Process(target=_waits, args=(tmp_path, begun, ended), daemon=True)
    saver.start()
    assert begun.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = checkpoint.newest(tmp_path)
    assert found.step == 1
    assert [(passed.path.name, passed.reason) for passed in found.skipped] == [
        (".step-00000002.partial", "is being saved")
    ]
    saver.kill()
    saver.join(60)
    with pytest.warns(
        UserWarning, match=r"skipped \.step-00000002\.partial: was never finished: the save was"
    ):
        assert checkpoint.newest(tmp_path).step == 1
