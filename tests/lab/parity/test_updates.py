"""Lost updates, against a count by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from castwise import Plan
from castwise.lab.parity.updates import WARM_STEPS, lost_updates

CPU = torch.device("cpu")
TRUE = Plan.preset("bf16-true")


class Weights(nn.Module):
    """Weights whose gradient under :func:`_push` is what a batch says."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(values.clone())


def _push(model: nn.Module, batch: Tensor) -> Tensor:
    return (model.w * batch).sum()


def _batches(batch: Tensor) -> Iterator[Tensor]:
    while True:
        yield batch


def _sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("plan", "last_place"), [("bf16-true", 2.0**-7), ("fp16-true", 2.0**-10)])
def test_updates_below_half_of_the_last_place_are_lost_and_others_are_not(
    plan: str, last_place: float
) -> None:
    weights = torch.full((8,), 1.5)
    update = last_place * torch.tensor([0.0, 0.0, 0.1, 0.2, -0.4, 0.75, -1.0, 3.0])
    # undo the warm steps beforehand, so that the last update starts at 1.5 exactly
    model = Weights(weights + WARM_STEPS * update)
    found = lost_updates(model, _push, _batches(update), _sgd, Plan.preset(plan), CPU)
    assert found == 3 / 6


def test_it_is_the_share_counted_by_hand_after_warm_steps_of_adam() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    data = [torch.randn(4, 6) for _ in range(WARM_STEPS + 1)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def adam(params: object) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=1e-3)  # type: ignore[arg-type]

    found = lost_updates(model, loss, iter(data), adam, TRUE, CPU)
    trained = copy.deepcopy(model)
    optimizer = adam(trained.parameters())
    for batch in data:
        before = [p.detach().clone() for p in trained.parameters()]
        optimizer.zero_grad()
        loss(trained, batch).backward()
        optimizer.step()
    moved = lost = 0
    for old, new in zip(before, trained.parameters(), strict=True):
        for was, now in zip(old.flatten().tolist(), new.flatten().tolist(), strict=True):
            stored = torch.tensor(was).bfloat16()
            step = float(torch.tensor(now) - torch.tensor(was))
            moved += step != 0
            lost += step != 0 and bool((stored.float() + step).bfloat16() == stored)
    assert 0 < lost < moved
    assert found == lost / moved


def test_nothing_that_moves_is_nothing_lost() -> None:
    found = lost_updates(Weights(torch.ones(3)), _push, _batches(torch.zeros(3)), _sgd, TRUE, CPU)
    assert found == 0.0


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master"])
def test_it_is_not_asked_of_plans_that_keep_fp32(plan: str) -> None:
    def never(model: nn.Module, batch: Tensor) -> Tensor:
        raise AssertionError("no pass is needed")

    assert lost_updates(Weights(torch.ones(3)), never, iter(()), _sgd, Plan.preset(plan), CPU) is None


def test_frozen_parameters_do_not_count() -> None:
    model = Weights(torch.full((2,), 1.5))
    model.frozen = nn.Parameter(torch.ones(1000), requires_grad=False)
    assert lost_updates(model, _push, _batches(torch.full((2,), 1e-6)), _sgd, TRUE, CPU) == 1.0


def test_the_model_is_not_trained() -> None:
    model = Weights(torch.ones(3))
    lost_updates(model, _push, _batches(torch.ones(3)), _sgd, TRUE, CPU)
    assert torch.equal(model.w, torch.ones(3))
    assert model.w.grad is None


def test_only_what_a_plan_stores_low_can_lose_updates() -> None:
    small = 1e-3 * torch.ones(4)
    exact = Weights(torch.ones(4, dtype=torch.complex64))
    found = lost_updates(exact, lambda m, b: (m.w * b).sum().imag, _batches(small), _sgd, TRUE, CPU)
    assert found == 0.0
    assert lost_updates(Weights(torch.ones(4).double()), _push, _batches(small), _sgd, TRUE, CPU) == 0.0
    assert lost_updates(Weights(torch.ones(4)), _push, _batches(small), _sgd, TRUE, CPU) == 1.0
