"""A recovery goes back within an epoch only, so work done between epochs is not undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

import castwise
from castwise.lab.passes.isolation import seed_all
from castwise.lab.watch.recovery import Recovery
from tests.here import DEVICE

pytestmark = [
    pytest.mark.filterwarnings("ignore:Recovery. step:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler:UserWarning"),
]
Batch = tuple[Tensor, Tensor]
EPOCHS, STEPS = 4, 8
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def epoch(number: int) -> list[Batch]:
    generator = torch.Generator(DEVICE).manual_seed(number)
    inputs = torch.randn(STEPS, 16, 8, generator=generator)
    return [(x, x[:, :1] + 0.1 * torch.randn(16, 1, generator=generator)) for x in inputs]


def train(
    folder: Path | None, bad: tuple[int, int], scheduler: str, every: int = 5, stop: int = STEPS
) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Train; return learning rates, weights and their average. Without a folder: no recovery, no bad batch."""
    seed_all(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = SCHEDULERS[scheduler](optimizer)
    amp = castwise.Amp("bf16-master", device=DEVICE)
    amp.prepare(model, optimizer)
    average = castwise.AveragedModel(model)
    also = {"schedule": schedule, "average": average}
    recovery = (
        None if folder is None else Recovery(amp, model, optimizer, loss, folder, also=also, every=every)
    )
    rates: dict[tuple[int, int], float] = {}
    for number in range(EPOCHS):
        data: list[tuple[int, int, Batch]] = []
        for at, (x, y) in enumerate(epoch(number)[:stop]):
            if (number, at) != bad:
                data.append((number, at, (x, y)))
            elif recovery is not None:
                data.append((number, at, (x, y * float("nan"))))
        for one in data if recovery is None else recovery.batches(data):
            rates[one[:2]] = optimizer.param_groups[0]["lr"]
            amp.backward(loss(model, one[2]))
            amp.step(optimizer)
            optimizer.zero_grad()
            if one[:2] == (number, stop - 1):
                break  # many training loops leave an epoch this way
        schedule.step(*([1.0] if scheduler == "plateau" else []))
        average.update_parameters(model)
    if recovery is not None:
        assert [one.cause for one in recovery.returns] == ["batch"]
    rates.pop(bad, None)
    weights = {name: value.clone() for name, value in amp.model_state_dict(model).items()}
    amp.close()
    return [rates[key] for key in sorted(rates)], weights, average.state_dict()


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    ("bad", "every"),
    [
        ((2, 1), 5),  # back to the start of the epoch
        ((2, 0), 100),
        ((2, 6), 5),  # back to a state within the epoch
    ],
)
def test_a_scheduler_that_steps_once_an_epoch_keeps_its_place(
    scheduler: str, bad: tuple[int, int], every: int, tmp_path: Path
) -> None:
    rates, weights, average = train(tmp_path, bad, scheduler, every)
    wanted, without, also = train(None, bad, scheduler)
    assert len(set(wanted)) == EPOCHS  # each epoch has its own rate, so a shift by one epoch shows
    assert rates == wanted
    assert equal(weights, without)
    assert equal(average, also)


def test_an_epoch_that_is_broken_off_counts_as_one(tmp_path: Path) -> None:
    rates, weights, _ = train(tmp_path, (2, 1), "exponential", 5, stop=6)
    wanted, without, _ = train(None, (2, 1), "exponential", stop=6)
    assert rates == wanted
    assert equal(weights, without)


def test_an_epoch_that_is_left_at_the_step_that_diverged_ends_at_its_last_good_state(tmp_path: Path) -> None:
    """The divergence is only detected when the next epoch begins."""
    seed_all(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    amp = castwise.Amp("fp32", device=DEVICE)
    amp.prepare(model, optimizer)
    recovery = Recovery(amp, model, optimizer, loss, tmp_path, every=100)
    starts: list[Tensor] = []
    for number in range(3):
        for at, (x, y) in enumerate(recovery.batches(epoch(number))):
            if at == 0:
                starts.append(model[0].weight.detach().clone())
            amp.backward(loss(model, (x, y * (float("nan") if (number, at) == (1, 5) else 1.0))))
            amp.step(optimizer)
            optimizer.zero_grad()
            if at == 5:
                break
    assert torch.equal(starts[2], starts[1])
    assert [one.action for one in recovery.returns] == [
        "the next epoch starts from the last good state of this epoch"
    ]
    assert recovery.step == 17
    amp.close()


def test_good_states_are_those_of_the_epoch(tmp_path: Path) -> None:
    seed_all(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    amp = castwise.Amp("fp32", device=DEVICE)
    amp.prepare(model, optimizer)
    recovery = Recovery(amp, model, optimizer, loss, tmp_path, every=3)
    for number in range(3):
        for at, batch in enumerate(recovery.batches(epoch(number))):
            assert all(good.step >= STEPS * number for good in recovery._states.all), at
            amp.backward(loss(model, batch))
            amp.step(optimizer)
            optimizer.zero_grad()
    assert len([*tmp_path.glob("step-*")]) == len(recovery._states.all) == 2
    amp.close()
