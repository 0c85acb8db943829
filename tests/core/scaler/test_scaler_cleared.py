"""Gradients computed from copies of scaled ones after ``zero_grad()``: only these are refused at the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise import Amp
from castwise.errors import StateError
from tests.here import DEVICE

PLANS = ("fp16-mixed", "fp16-master", "fp16-mixed+loss_scale.init=128")


def task(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(number)
    x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
    return nn.functional.mse_loss(model(x).float(), y)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def pcgrad(grads: Sequence[Tensor]) -> Tensor:
    """Project one gradient of each conflicting pair onto the plane normal to the other."""
    merged = [grad.clone() for grad in grads]
    for mine in merged:
        for other in grads:
            inner = (mine * other).sum()
            if inner < 0:
                mine -= inner / (other * other).sum().clamp_min(1e-12) * other
    return torch.stack(merged).sum(0)


SURGERY: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "pcgrad": pcgrad,
    "mean": lambda grads: torch.stack(list(grads)).mean(0),
    "last": lambda grads: grads[-1],
    "weighted": lambda grads: 0.9 * grads[0] + 0.1 * grads[1],
    "clipped": lambda grads: torch.stack(list(grads)).sum(0).clamp(-1e4, 1e4),
}


def per_task(amp: Amp, model: nn.Module, optimizer: Any, *, unscale: bool = False) -> list[list[Tensor]]:
    found = []
    for number in range(3):
        optimizer.zero_grad()
        amp.backward(task(model, number))
        if unscale:
            amp.unscale_(optimizer)
        found.append([parameter.grad.float().clone() for parameter in model.parameters()])
    optimizer.zero_grad()
    return found


def set_on(model: nn.Module, grads: Sequence[Tensor]) -> None:
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad


@pytest.mark.parametrize("how", SURGERY)
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_made_of_scaled_gradients_is_refused(plan: str, how: str) -> None:
    amp, model = Amp(plan, device=DEVICE), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.prepare(model, optimizer)
    for step in (optimizer.step, lambda: amp.step(optimizer)):
        grads = per_task(amp, model, optimizer)
        set_on(model, [SURGERY[how](each) for each in zip(*grads, strict=True)])
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(StateError, match="scale"):
            step()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        optimizer.zero_grad()


@pytest.mark.parametrize("how", SURGERY)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", ["unscale_", "grad"])
def test_the_cures_of_the_message_train_as_fp32_does(plan: str, how: str, way: str) -> None:
    weights = []
    for name in ("fp32", plan):
        amp, model = Amp(name, device=DEVICE), net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        amp.prepare(model, optimizer)
        params = [*model.parameters()]
        for _ in range(5):
            if way == "grad":
                grads = [[*amp.grad(task(model, number), params)] for number in range(3)]
            else:
                grads = per_task(amp, model, optimizer, unscale=True)
            set_on(model, [SURGERY[how](each) for each in zip(*grads, strict=True)])
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
        amp.close()
    assert (weights[0] - weights[1]).norm() < 0.02 * weights[0].norm()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["reptile", "inner adam", "true", "noise"])
def test_gradients_of_ones_own_are_stepped(plan: str, kind: str) -> None:
    """After backward passes with cleared gradients, the user sets weight differences or gradients unscaled by hand."""
    amp, model = Amp(plan, device=DEVICE), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.prepare(model, optimizer)
    params = [*model.parameters()]
    for _ in range(4):
        amp.backward(task(model, 0))
        scaled = [parameter.grad.float().clone() for parameter in params]
        scale = amp.get_scale()
        optimizer.zero_grad()
        if kind == "true":
            grads = [grad / scale for grad in scaled]
        elif kind == "noise":
            grads = [torch.randn_like(grad) for grad in scaled]
        else:
            lr = (
                0.05
                if kind == "reptile"
                else 1.0 / max(float(torch.cat([g.flatten() for g in scaled]).norm()), 1.0)
            )
            grads = [lr * grad / (scale if kind == "reptile" else 1.0) for grad in scaled]
        set_on(model, grads)
        before = [parameter.detach().clone() for parameter in params]
        optimizer.step()
        optimizer.zero_grad()
        assert not all(map(torch.equal, before, params))


def test_a_gan_whose_critic_is_cleared_before_its_own_loss() -> None:
    amp, critic, maker = Amp("fp16-mixed", device=DEVICE), net(), nn.Linear(8, 8)
    both = [torch.optim.SGD(model.parameters(), 0.01) for model in (critic, maker)]
    amp.prepare(critic, both[0])
    amp.prepare(maker, both[1])
    for number in range(6):
        x = torch.randn(16, 8, generator=torch.Generator(DEVICE).manual_seed(number))
        amp.backward(critic(maker(x)).square().mean())
        amp.step(both[1])
        both[1].zero_grad()
        both[0].zero_grad()
        amp.backward(critic(maker(x).detach()).mean())
        amp.step(both[0])
        both[0].zero_grad()
    assert amp.skipped_steps == 0


@pytest.mark.parametrize("plan", ["fp16-mixed+loss_scale.init=64", "fp16-mixed+loss_scale.init=512"])
def test_true_gradients_that_are_large_beside_what_was_cleared_are_stepped(plan: str) -> None:
    """The critic's gradients from the generator's loss are cleared; its own are unscaled, or computed by ``amp.grad``."""
    amp, critic = Amp(plan, device=DEVICE), net()
    optimizer = torch.optim.SGD(critic.parameters(), 1e-6)
    amp.prepare(critic, optimizer)
    for way in ("unscale_", "grad") * 3:
        amp.backward(task(critic, 0) * 1e-3)
        optimizer.zero_grad()
        loss = -10.0 * task(critic, 0)
        if way == "grad":
            set_on(critic, amp.grad(loss, [*critic.parameters()]))
        else:
            amp.backward(loss)
            amp.unscale_(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert amp.skipped_steps == 0
