"""What a loop does between two passes over its data is done again where a recovery goes back past it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils

import castwise
from castwise.lab.parity.isolation import seed_all
from castwise.lab.watch.between import Breaks
from castwise.lab.watch.recovery import Recovery

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
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(STEPS, 16, 8, generator=generator)
    return [(x, x[:, :1] + 0.1 * torch.randn(16, 1, generator=generator)) for x in inputs]


def train(
    folder: Path | None, bad: tuple[int, int], scheduler: str, every: int = 5, stop: int = STEPS
) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Rates by step, weights and their average; without a folder there is no recovery, and the bad batch is left out."""
    seed_all(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = SCHEDULERS[scheduler](optimizer)
    amp = castwise.Amp("bf16-master", device="cpu")
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
                break  # the pass is left as many loops leave it
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
        ((2, 1), 5),  # back into the epoch before
        ((2, 0), 100),  # back to the start, over two ends
        ((2, 1), 8),  # to a good state that was saved at the very end, before the scheduler stepped
    ],
)
def test_a_scheduler_that_steps_once_an_epoch_keeps_its_place(
    scheduler: str, bad: tuple[int, int], every: int, tmp_path: Path
) -> None:
    rates, weights, average = train(tmp_path, bad, scheduler, every)
    wanted, without, also = train(None, bad, scheduler)
    assert len(set(wanted)) == EPOCHS  # an epoch that is one behind shows
    assert rates == wanted
    assert equal(weights, without)
    assert equal(average, also)


def test_a_pass_that_is_broken_off_counts_as_one(tmp_path: Path) -> None:
    rates, weights, _ = train(tmp_path, (2, 1), "exponential", 5, stop=6)
    wanted, without, _ = train(None, (2, 1), "exponential", stop=6)
    assert rates == wanted
    assert equal(weights, without)


def test_what_steps_with_the_training_is_not_done_again() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    breaks = Breaks([optimizer], {"schedule": schedule})
    for cursor in (0, 3):
        here = breaks.enter(cursor)
        optimizer.step()
        schedule.step()
        breaks.leave(here)
    assert breaks.count == 0


def test_options_and_averages_change_between_passes_and_what_is_forgotten_is_not_done_again() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(1.0), foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    average = swa_utils.AveragedModel(model)
    breaks = Breaks([optimizer], {"average": average})
    breaks.leave(breaks.enter(0))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    rate.fill_(0.25)
    average.update_parameters(model)
    breaks.leave(breaks.enter(4))
    assert breaks.count == 1
    optimizer.param_groups[0]["weight_decay"] = 0.0
    rate.fill_(1.0)
    average.n_averaged.zero_()
    breaks.go_back(0)
    breaks.redo(3)
    assert float(rate) == 1.0
    breaks.redo(4)
    assert optimizer.param_groups[0]["lr"] is rate
    assert (float(rate), optimizer.param_groups[0]["weight_decay"], int(average.n_averaged)) == (0.25, 0.5, 1)
    breaks.forget_before(1)
    rate.fill_(1.0)
    breaks.redo()
    assert float(rate) == 1.0
