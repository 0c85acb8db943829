"""Calls that torch's scaler refuses are refused under every plan; also, gradients computed for a penalty."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.errors import PlanError, StateError
from tests.here import DEVICE
from tests.soak import each_value

PLANS = ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-true", "fp16-true", "O2"]
X = torch.ones(2, 4)


def make(plan: str, **options: Any) -> tuple[castwise.Amp, nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    amp = castwise.Amp(plan, device=DEVICE, **options)
    amp.prepare(model, optimizer)
    return amp, model, optimizer


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(X).float().square().mean()


@each_value(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", ["again", "max_norm", "twice", "unscaled", "evaluated", "skipped"])
def test_a_second_step_by_the_same_gradients_is_refused(plan: str, way: str) -> None:
    amp, model, optimizer = make(plan)
    amp.backward(loss_of(model) * (math.nan if way == "skipped" else 1.0))
    if way == "twice":
        with pytest.raises(StateError, match=r"step\(SGD, SGD\): an optimizer is given twice"):
            amp.step(optimizer, optimizer)
        amp.step(optimizer)
    else:
        assert bool(amp.step(optimizer)) is (way != "skipped")
    weights = model.weight.detach().clone()
    if way == "unscaled":
        amp.unscale_(optimizer)
    if way == "evaluated":
        with torch.no_grad():
            model(X)
    with pytest.raises(
        StateError, match=r"step\(SGD\): it has already stepped with these gradients.*once after each"
    ):
        amp.step(optimizer, max_norm=1.0 if way == "max_norm" else None)
    assert torch.equal(weights, model.weight)
    amp.backward(loss_of(model))  # adds to the existing gradients, as torch does
    assert bool(amp.step(optimizer)) is (way != "skipped")
    amp.close()


@each_value(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("by", ["amp", "loss"])
def test_the_loops_that_there_are_raise_no_alarm(plan: str, zeros: bool, by: str) -> None:
    """Covers accumulation, retained graphs, gradients set by hand, and an optimizer whose part gets no gradients."""
    scaled = castwise.Plan.preset(plan).loss_scale is not None
    amp, model, optimizer = make(plan + ("+loss_scale.init=8" if scaled else ""))
    if by == "loss" and scaled:
        by = "scale"

    def backward(**kwargs: Any) -> None:
        loss = loss_of(model)
        for kept in (True, False):
            if by == "amp":
                amp.backward(loss, retain_graph=kept, **kwargs)
            else:
                (amp.scale(loss) if by == "scale" else loss).backward(retain_graph=kept, **kwargs)

    for _ in range(2):
        backward()
        assert amp.step(optimizer)
        optimizer.zero_grad(set_to_none=not zeros)
    backward(inputs=[model.bias])
    assert amp.step(optimizer)
    backward(inputs=[model.weight])
    assert amp.step(optimizer)
    optimizer.zero_grad(set_to_none=not zeros)
    amp.close()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("nonfinite", ["skip", "allow"])
def test_a_step_without_gradients_is_refused(plan: str, nonfinite: str) -> None:
    if nonfinite == "allow" and castwise.Plan.preset(plan).loss_scale is not None:
        return
    amp, model, optimizer = make(plan, nonfinite=nonfinite)
    for way in ({}, {"max_norm": 1.0}):
        with pytest.raises(
            StateError, match=r"step\(SGD\): no parameter has a gradient.*amp\.backward\(loss\) before it"
        ):
            amp.step(optimizer, **way)
    amp.backward(loss_of(model))
    optimizer.zero_grad()
    with pytest.raises(StateError, match="no parameter has a gradient"):
        amp.step(optimizer)
    amp.backward(loss_of(model))
    assert amp.step(optimizer)
    amp.close()


def test_an_optimizer_without_gradients_may_step_beside_one_that_has_some() -> None:
    amp, model, optimizer = make("bf16-mixed")
    other = nn.Linear(2, 2)
    rests = torch.optim.SGD(other.parameters(), 0.5)
    amp.prepare(other, rests)
    amp.backward(loss_of(model))
    assert amp.step(optimizer, rests)


@pytest.mark.parametrize("plan", PLANS)
def test_a_complex_loss_is_refused(plan: str) -> None:
    amp, model, _ = make(plan)
    loss = loss_of(model) * (1 + 1j)
    for name, call in (
        ("backward", amp.backward),
        ("scale", amp.scale),
        ("grad", lambda loss: amp.grad(loss, [X])),
    ):
        with pytest.raises(PlanError, match=rf"{name}: the loss is complex \(complex64\).*loss\.real"):
            call(loss)
    amp.backward(loss.real)
    amp.close()


@each_value(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("how", ["itself", "divided", "summed", "a list", "amp.scale"])
def test_a_loss_that_is_scaled_already_is_refused(plan: str, how: str) -> None:
    amp, model, optimizer = make(plan)
    leftover = torch.amp.GradScaler(DEVICE)
    before = model.weight.detach().clone()
    if how == "a list":
        loss: torch.Tensor = leftover.scale([loss_of(model), loss_of(model)])[0]
    else:
        loss = leftover.scale(loss_of(model))
    loss = {"divided": loss / 4, "summed": loss + loss_of(model)}.get(how, loss)
    if how == "amp.scale":
        loss = amp.scale(loss_of(model))
        if amp.plan.loss_scale is None:
            return
    with pytest.raises(
        StateError, match=r"backward: this loss has been scaled already.*Remove the GradScaler"
    ):
        amp.backward(loss)
    if how == "itself":
        with pytest.raises(StateError, match="scale: this loss has been scaled already"):
            amp.scale(loss)
    assert model.weight.grad is None
    amp.backward(loss_of(model))
    amp.step(optimizer)
    assert not torch.equal(before, model.weight)
    amp.close()


def test_a_gradscaler_may_go_on_by_itself_where_the_plan_has_none() -> None:
    amp, model, optimizer = make("bf16-mixed")
    scaler = torch.amp.GradScaler(DEVICE)
    before = model.weight.detach().clone()
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model.weight)
    amp.close()
    assert (
        not hasattr(torch.amp.GradScaler.scale, "__wrapped__")
        or castwise.core._torch.optimizers.scaling._looks
    )


@pytest.mark.parametrize("value", [math.nan, -1.0, "1", None])
@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed"])
def test_a_bound_that_bounds_nothing_is_refused(plan: str, value: Any) -> None:
    amp, model, optimizer = make(plan)
    amp.backward(loss_of(model))
    for target in (optimizer, model.parameters()):
        with pytest.raises(
            PlanError,
            match=r"clip_grad_value_\(clip_value=.*(not a bound|must be a number >= 0).*Allowed: a number such as 1\.0",
        ):
            amp.clip_grad_value_(target, value)
    amp.clip_grad_value_(optimizer, math.inf)
    assert amp.step(optimizer)


# --- penalties ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_for_a_penalty_are_fp32_at_least(plan: str) -> None:
    amp, model, _ = make(plan)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.ones(2, 4, dtype=dtype, requires_grad=True)
        unused = torch.ones(1, requires_grad=True)
        grads = amp.grad(
            model(x.float()).sum(), [x, model.weight, unused], create_graph=True, allow_unused=True
        )
        assert [grad if grad is None else grad.dtype for grad in grads] == [
            torch.promote_types(dtype, torch.float32),
            torch.float32,
            None,
        ]
    amp.close()


class Gan:
    """A WGAN-GP: the critic overflows at the first scales, the generator never."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator, self.critic = (
            nn.Linear(8, 16),
            nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)),
        )
        self.optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (self.critic, self.generator)]

    @staticmethod
    def data(seed: int, width: int) -> torch.Tensor:
        return torch.randn(256, width, generator=torch.Generator(DEVICE).manual_seed(seed)) * 30

    def penalty(self, gradient: torch.Tensor) -> torch.Tensor:
        return 10 * (gradient.norm(dim=1) - 1).square().mean()


def gan_by_castwise(steps: int, **name: Any) -> list[bool]:
    gan = Gan()
    critic, (first, second) = gan.critic, gan.optimizers
    amp = castwise.Amp("fp16-mixed", device=DEVICE)
    amp.prepare(gan.generator, second)
    amp.prepare(critic, first)
    skipped = []
    for step in range(steps):
        real, fake = gan.data(step, 16), gan.generator(gan.data(1000 + step, 8)).detach()
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        (gradient,) = amp.grad(critic(mixed).sum(), mixed, create_graph=True, **name)
        amp.backward(critic(fake).mean() - critic(real).mean() + gan.penalty(gradient), name="critic")
        skipped.append(amp.step(first).skipped)
        first.zero_grad()
        amp.backward(-critic(gan.generator(gan.data(2000 + step, 8) / 300)).mean(), name="generator")
        assert amp.step(second)
        first.zero_grad()
        second.zero_grad()
    amp.close()
    return skipped


def gan_by_hand(steps: int) -> list[bool]:
    gan = Gan()
    critic, (first, second) = gan.critic, gan.optimizers
    scalers = torch.amp.GradScaler(DEVICE), torch.amp.GradScaler(DEVICE)

    def run(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.float16):
            return net(x).float()

    skipped = []
    for step in range(steps):
        real, fake = gan.data(step, 16), run(gan.generator, gan.data(1000 + step, 8)).detach()
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(
            scalers[0].scale(run(critic, mixed).sum()), mixed, create_graph=True
        )
        penalty = gan.penalty(gradient / scalers[0].get_scale())
        scalers[0].scale(run(critic, fake).mean() - run(critic, real).mean() + penalty).backward()
        before = scalers[0].get_scale()
        scalers[0].step(first)
        scalers[0].update()
        skipped.append(scalers[0].get_scale() < before)
        first.zero_grad()
        scalers[1].scale(-run(critic, run(gan.generator, gan.data(2000 + step, 8) / 300)).mean()).backward()
        scalers[1].step(second)
        scalers[1].update()
        first.zero_grad()
        second.zero_grad()
    return skipped


def test_a_gradient_penalty_with_named_losses_trains_as_by_hand() -> None:
    by_hand = gan_by_hand(24)
    assert 0 < sum(by_hand) < 8
    assert gan_by_castwise(24, name="critic") == by_hand
    assert gan_by_castwise(24) == by_hand


def test_a_step_result_is_true_where_the_step_was_made() -> None:
    amp, model, optimizer = make("fp32")
    for factor in (1.0, math.nan):
        amp.backward(loss_of(model) * factor)
        assert bool(amp.step(optimizer)) is (factor == 1.0)
        optimizer.zero_grad()
