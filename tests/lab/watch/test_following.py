"""A recorder and a recovery see all optimizer steps, however they are made, and report losses that they cannot see."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise.core import _torch
from castwise.errors import StateError
from castwise.lab.passes.isolation import seed_all
from castwise.lab.watch import Monitor
from castwise.lab.watch.recorder import Recorder
from castwise.lab.watch.recovery import Recovery
from castwise.lab.watch.replay import replay
from tests.here import DEVICE
from tests.lab.watch.jobs import Batch, loss

pytestmark = pytest.mark.filterwarnings("ignore:Recovery. step:UserWarning")
BAD = 9


def net() -> nn.Module:
    seed_all(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def data(count: int = 20, bad: int = BAD) -> Iterator[Batch]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    for number in range(count):
        x = torch.randn(16, 16, generator=generator)
        yield x, x[:, :4] * (float("nan") if number == bad else 1.0)


def start(plan: str) -> tuple[castwise.Amp, nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    return amp, model, optimizer


def plain(amp: castwise.Amp, value: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Make a step without ``amp.step``."""
    amp.backward(value)
    if amp.plan.loss_scale is not None:
        amp.unscale_(optimizer)
    optimizer.step()
    optimizer.zero_grad()


def alone(value: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Make a step in plain PyTorch, without the session."""
    value.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "bf16-master"])
def test_a_plain_step_is_recorded_and_gone_back_from(plan: str, tmp_path: Path) -> None:
    amp, model, optimizer = start(plan)
    recorder = Recorder(amp, model, tmp_path / "steps")
    recovery = Recovery(amp, model, optimizer, loss, tmp_path / "good", every=4)
    for batch in recovery.batches(recorder.batches(data())):
        plain(amp, loss(model, batch), optimizer)
    assert [path.name for path in recorder.records] == [f"step-{BAD + 1:08d}"]
    assert replay(tmp_path / "steps", net(), loss, find=False).exact
    (one,) = recovery.returns
    assert (one.step, one.to_step, one.cause) == (BAD, BAD + 1, "batch")
    assert len(recovery._data._kept) < 16
    amp.close()


def test_a_recovery_that_sees_no_loss_is_an_error_at_the_first_step(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed")
    recovery = Recovery(amp, model, optimizer, loss, tmp_path)
    seen: list[int] = []

    def go() -> None:
        for batch in recovery.batches(data()):
            alone(loss(model, batch), optimizer)
            seen.append(recovery.step)

    with pytest.raises(StateError, match=r"loss of a step was not recorded.*amp\.backward\(loss\)"):
        go()
    assert seen == [0]


def test_a_recorder_that_sees_no_loss_says_so_once_and_records_what_it_can(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed")
    recorder = Recorder(amp, model, tmp_path)

    def go() -> None:
        with recorder:
            for batch in recorder.batches(data()):
                alone(loss(model, batch), optimizer)

    with pytest.warns(UserWarning, match="loss of a step was not recorded") as said:
        go()
    assert len(said) == 1
    assert [path.name for path in recorder.records] == [f"step-{BAD + 1:08d}"]


@pytest.mark.parametrize("tool", ["recorder", "recovery", "monitor"])
def test_what_was_closed_is_not_used_again(tool: str, tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed")
    tools = {
        "recorder": lambda: Recorder(amp, model, tmp_path),
        "recovery": lambda: Recovery(amp, model, optimizer, loss, tmp_path),
        "monitor": lambda: Monitor(amp),
    }
    one = tools[tool]()
    with one:
        pass
    again = one.__enter__ if isinstance(one, Monitor) else one.batches(data()).__next__
    with pytest.raises(StateError, match="was closed; make a new one"):
        again()


@pytest.mark.parametrize("tool", ["recorder", "recovery"])
def test_closed_in_the_loop_it_keeps_nothing_and_the_loop_goes_on(tool: str, tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed")
    recorder, recovery = (
        Recorder(amp, model, tmp_path / "a"),
        Recovery(amp, model, optimizer, loss, tmp_path / "b"),
    )
    one: Recorder | Recovery = recorder if tool == "recorder" else recovery
    seen = 0
    for batch in one.batches(data(bad=-1)):
        plain(amp, loss(model, batch), optimizer)
        seen += 1
        if seen == 3:
            one.close()
    assert seen == 20
    assert recorder._step is None
    assert not recovery._data._kept


@pytest.mark.parametrize("make", [Recorder, lambda *given: Recovery(*given[:2], (), loss, given[2])])
def test_a_session_that_was_closed_is_watched_by_nobody(
    make: Callable[..., Recorder], tmp_path: Path
) -> None:
    amp, model, _ = start("bf16-mixed")
    one = make(amp, model, tmp_path)
    amp.close()
    with pytest.raises(StateError, match=r"batches: .* was not prepared by this Amp"):
        next(one.batches(data()))


def test_nothing_is_kept_alive_and_nothing_is_called_afterwards(tmp_path: Path) -> None:
    amp, model, optimizer = start("bf16-mixed")
    before = _torch.steps._subscribers  # the first session of a process adds a permanent one
    recorder = Recorder(amp, model, tmp_path / "a")
    recovery = Recovery(amp, model, optimizer, loss, tmp_path / "b")
    gone = [weakref.ref(one) for one in (amp, model, recorder, recovery)]
    del amp, model, optimizer, recorder, recovery
    gc.collect()
    assert [one() for one in gone] == [None] * 4
    assert _torch.steps._subscribers == before
