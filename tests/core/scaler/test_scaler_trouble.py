"""Steps that a scaler undoes, and scales that cannot shrink further."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from castwise import GradScaler
from castwise.errors import LossScaleError
from tests.here import DEVICE, until_known

INF = float("inf")

# --- closures -----------------------------------------------------------------------------------------------


def closure_for(
    scaler: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        (value if scaler is None else scaler.scale(value)).backward()
        return value

    return closure


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_is_what_it_is_without_a_scale(positional: bool, search: str | None) -> None:
    """With a power of two as the scale and fp32 throughout, the trajectories are equal bit for bit."""

    def run(scaler: GradScaler | None) -> list[float]:
        p = nn.Parameter(torch.tensor([3.0, -2.0, 0.5]))
        optimizer = torch.optim.LBFGS([p], 0.7, max_iter=4, line_search_fn=search)
        closure = closure_for(scaler, optimizer, lambda: ((p - 1) ** 4).sum() + (p[0] * p[1]) ** 2)
        values = []
        for _ in range(4):
            if scaler is None:
                values.append(optimizer.step(closure).item())
            else:
                value = (
                    scaler.step(optimizer, closure) if positional else scaler.step(optimizer, closure=closure)
                )
                values.append(value.item())
                assert not scaler.last_result.skipped
                scaler.update()
        return values + p.tolist()

    assert run(GradScaler(DEVICE)) == run(None)


@pytest.mark.parametrize("bad_evaluation", [1, 3])
@pytest.mark.parametrize("value", [INF, float("nan")])
def test_a_non_finite_evaluation_takes_the_whole_step_back(bad_evaluation: int, value: float) -> None:
    p = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = torch.optim.LBFGS([p], 0.1, max_iter=4)
    scaler = GradScaler(DEVICE, init_scale=8.0)
    bad = torch.tensor(1.0)
    evaluations = 0

    def loss() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        return (p**4).sum() * (bad if evaluations == bad_evaluation else 1.0)

    closure = closure_for(scaler, optimizer, loss)
    evaluations = 10
    scaler.step(optimizer, closure=closure)  # creates state that must be kept
    scaler.update()
    values, state = p.tolist(), repr(optimizer.state_dict())
    evaluations, bad = 0, torch.tensor(value)
    assert scaler.step(optimizer, closure=closure) is None
    assert evaluations == bad_evaluation
    assert scaler.last_result.skipped
    assert float(scaler.last_result.found_inf) > 0
    assert (p.tolist(), repr(optimizer.state_dict())) == (values, state)
    scaler.update()
    assert (scaler.get_scale(), scaler.previous_skipped) == (4.0, True)
    scaler.step(optimizer, closure=closure)
    assert p.tolist() != values
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer, closure=closure)


def test_a_closure_passes_other_arguments_on_and_options_are_taken_back() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None, extra: int = 0) -> Any:
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + extra
                group["rates"] = [*group.get("rates", []), extra]
            return super().step(closure)

    p = nn.Parameter(torch.ones(2))
    optimizer = Counting([p], torch.tensor(0.1))
    scaler = GradScaler(DEVICE, init_scale=8.0)
    rate = optimizer.param_groups[0]["lr"]
    scaler.step(optimizer, closure_for(scaler, optimizer, p.sum), extra=3)
    scaler.update()
    group = optimizer.param_groups[0]
    assert (group["steps"], group["rates"]) == (3, [3])
    scaler.step(optimizer, closure=closure_for(scaler, optimizer, lambda: p.sum() * INF), extra=2)
    assert (group["steps"], group["rates"], group["lr"] is rate) == (3, [3], True)
    fresh = Counting([p], 0.1)
    scaler.update()
    scaler.step(fresh, closure=closure_for(scaler, fresh, lambda: p.sum() * INF), extra=2)
    assert "steps" not in fresh.param_groups[0]


def test_an_optimizer_that_climbs_before_it_evaluates() -> None:
    """Sharpness-aware minimisation uses gradients from before its closure, which must be unscaled as well."""

    class Climbing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            (p,) = self.param_groups[0]["params"]
            climb = p.grad.clone()
            with torch.no_grad():
                p.add_(climb)
            with torch.enable_grad():
                value = closure()
            with torch.no_grad():
                p.sub_(climb)
            super().step()
            return value

    def run(scaler: GradScaler | None) -> list[float]:
        p = nn.Parameter(torch.tensor([3.0, -2.0]))
        optimizer = Climbing([p], 0.125)
        closure = closure_for(scaler, optimizer, lambda: (p**2).sum())
        closure()
        if scaler is None:
            optimizer.step(closure)
        else:
            scaler.step(optimizer, closure)
        return p.tolist()

    assert run(GradScaler(DEVICE)) == run(None)


def test_an_error_in_a_closure_is_the_callers() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([p])
    scaler = GradScaler(DEVICE)

    def closure() -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer, closure=closure)
    with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
        scaler.step(optimizer, closure=lambda: p.sum())


# --- the floor ----------------------------------------------------------------------------------------------


def test_a_scale_at_its_floor_raises_with_names() -> None:
    model = nn.ModuleDict({"good": nn.Linear(2, 2, bias=False), "bad": nn.Linear(2, 2, bias=False)})
    for fused in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
        scaler = GradScaler(DEVICE, init_scale=4.0, floor=1.0, patience=3)
        scaler.param_names = lambda: {id(p): name for name, p in model.named_parameters()}

        def train(steps: int, scaler: GradScaler = scaler, optimizer: Any = optimizer) -> None:
            for _ in range(steps):
                loss = model["good"].weight.sum() + model["bad"].weight.sum() * float("nan")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

        train(2)  # from 4 down to the floor
        words = r"[3-6] times in a row.*floor, 1; first affected: bad\.weight\. A"
        with pytest.raises(LossScaleError, match=words):
            until_known(lambda: train(1), fused)


def overflow(scaler: GradScaler, steps: int, fused: bool = False) -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizers = [torch.optim.AdamW([p], 0.1, fused=fused) for p in params]
    for _ in range(steps):
        scaler.scale(params[0].sum() * INF + params[1].sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_one_bad_optimizer_among_two_is_enough(fused: bool) -> None:
    with pytest.raises(LossScaleError, match=r"param_groups\[0\]\['params'\]\[0\]\. A smaller"):
        overflow(GradScaler(DEVICE, init_scale=8.0, floor=1.0, patience=3), 10, fused)


def test_without_a_floor_the_end_of_fp32_is_one() -> None:
    scaler = GradScaler(DEVICE, init_scale=2.0**-120, patience=3)
    with pytest.raises(LossScaleError, match=r"7 times in a row.*at its floor, 1\.17549e-38"):
        overflow(scaler, 20)
    assert scaler.get_scale() > 0


def test_a_static_scale_that_always_overflows_is_an_error_too() -> None:
    with pytest.raises(
        LossScaleError, match=r"the loss scale is static, 8; .*Use a dynamic or smaller loss scale"
    ):
        overflow(GradScaler(DEVICE, init_scale=8.0, dynamic=False, patience=3), 3)


def test_overflows_with_room_below_or_in_between_are_no_error() -> None:
    scaler = GradScaler(DEVICE, init_scale=2.0**40, floor=1.0, patience=3)
    overflow(scaler, 20)
    assert scaler.get_scale() == 2.0**20
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.1)
    scaler = GradScaler(DEVICE, init_scale=1.0, floor=1.0, patience=2)
    for factor in (INF, 1.0) * 5:
        scaler.scale(p.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_overflows_in_a_row_are_counted_anew_after_loading() -> None:
    scaler = GradScaler(DEVICE, init_scale=1.0, floor=1.0, patience=3)
    state = scaler.state_dict()
    for _ in range(3):
        overflow(scaler, 2)
        scaler.load_state_dict(state)
    overflow(scaler, 2)
    with pytest.raises(LossScaleError, match="3 times in a row"):
        overflow(scaler, 1)


def test_momentum_that_a_skipped_first_step_left_unwritten_goes() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.1, momentum=0.9, fused=True)
    scaler = GradScaler(DEVICE)
    scaler.scale(p.sum() * INF).backward()
    scaler.step(optimizer)
    assert not optimizer.state
    scaler.update()


def test_names_come_from_the_optimizer_where_it_has_them() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), 0.1)
    model.weight.grad = torch.full((2, 2), float("nan"))
    model.bias.grad = torch.ones(2)
    scaler = GradScaler(DEVICE)
    assert scaler.non_finite_params(optimizer) == ["weight"]
    scaler.param_names = lambda: {id(model.weight): "encoder.weight"}
    assert scaler.non_finite_params(optimizer) == ["encoder.weight"]
