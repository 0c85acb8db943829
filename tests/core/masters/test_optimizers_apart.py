"""Optimizers that update during backward, one per layer, or inside another optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import castwise
from castwise.errors import StateError
from tests.core.masters.outside import SAM
from tests.here import DEVICE
from tests.soak import each_value

PLANS = [
    "fp32",
    "bf16-mixed",
    "fp16-mixed",
    "bf16-master",
    "fp16-master",
    "bf16-true",
    "fp16-true+loss_scale.init=8",
    "O2",
]
X = torch.ones(2, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(X).float().square().mean()


class Lomo(Optimizer):
    """LOMO as in the package ``lomo_optim``: a hook on each gradient updates parameters, and a last call updates the
    rest.
    """

    def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
        self.model, self.lr = model, lr
        self.update = self.fuse_update()
        for parameter in model.parameters():
            parameter.register_hook(self.update)
        super().__init__(model.parameters(), {"lr": lr})

    def fuse_update(self) -> Callable[[Any], Any]:
        def func(grad: Any) -> Any:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        grad_fp32, parameter.grad = parameter.grad.float(), None
                        parameter.data.copy_(parameter.data.float().add_(grad_fp32, alpha=-self.lr))
            return grad

        return func

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        self.lr = lr
        loss.backward()
        self.update(None)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("given", [True, False])
def test_updates_inside_of_a_backward_are_right_or_refused(plan: str, given: bool) -> None:
    model, plain = net(), net()
    lomo, by_hand = Lomo(model), Lomo(plain)
    amp = castwise.Amp(plan, device=DEVICE)
    args = (model, lomo) if given else (model,)
    if amp.plan.loss_scale is not None or amp.plan.keeps_masters:
        with pytest.raises(
            StateError,
            match=r"prepare\(Sequential\): Lomo updates weights inside the backward, where the plan .*'bf16-mixed'",
        ):
            amp.prepare(*args)
        assert castwise.Amp.of(model) is None
        return
    with pytest.warns(
        UserWarning, match=r"Lomo updates weights inside the backward, so gradients that are not finite"
    ):
        amp.prepare(*args)
    if plan == "bf16-true":
        plain.bfloat16()
    for _ in range(3):
        lomo.fused_backward(loss_of(model), 0.05)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=plan == "bf16-mixed"):
            out = plain(X.to(plain[0].weight.dtype))
        by_hand.fused_backward(out.float().square().mean(), 0.05)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    amp.close()


@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_for_each_layer_that_was_not_prepared(plan: str) -> None:
    """As with GaLore's layer-wise mode: hooks step optimizers that were not prepared, while the trainer has a dummy
    one.
    """
    model, plain = net(), net()
    runs = ((castwise.Amp(plan, device=DEVICE), model), (None, plain))

    def step(optimizer: Optimizer) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return hook

    for amp, net_ in runs:
        for parameter in net_.parameters():
            parameter.register_post_accumulate_grad_hook(step(torch.optim.SGD([parameter], 0.1)))
        if amp is not None:
            amp.prepare(net_)
            before = [parameter.detach().clone() for parameter in net_.parameters()]
            if amp.plan.loss_scale is not None or amp.plan.keeps_masters:
                with pytest.raises(
                    StateError,
                    match=r"SGD\.step\(\): (the loss scale is still|.*was not prepared|.*is stored in)",
                ):
                    amp.backward(loss_of(net_))
                assert all(map(torch.equal, before, net_.parameters()))
            else:
                amp.backward(loss_of(net_))
                assert not any(map(torch.equal, before, net_.parameters()))
            amp.close()


def sam(model: nn.Module) -> SAM:
    return SAM(model.parameters(), torch.optim.SGD, lr=0.1, rho=0.05)


def sam_steps(model: nn.Module, optimizer: SAM, steps: int, amp: castwise.Amp | None) -> None:
    def backward(bad: bool) -> None:
        loss = loss_of(model) * (math.nan if bad else 1.0)
        if amp is None:
            loss.backward()
        else:
            amp.backward(loss)
            amp.unscale_(optimizer)

    for _ in range(steps):
        backward(False)
        optimizer.first_step(zero_grad=True)
        backward(False)
        optimizer.second_step(zero_grad=True)


@pytest.mark.parametrize(
    "plan",
    ["fp32", "fp16-mixed+loss_scale.init=64+ops.addmm=fp32", "bf16-master", "fp16-master+loss_scale.init=64"],
)
def test_an_optimizer_around_another_trains_as_by_hand(plan: str) -> None:
    model, plain = net(), net()
    optimizer, by_hand = sam(model), sam(plain)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    sam_steps(model, optimizer, 3, amp)
    sam_steps(plain, by_hand, 3, None)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=2e-2, atol=2e-2)
    assert amp.skipped_steps == 0
    amp.close()


@each_value(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("fused", [False, True])
def test_the_optimizer_inside_another_is_looked_after(plan: str, fused: bool) -> None:
    """Its own step uses the outer optimizer's gradients: refused while they are scaled, skipped if they are not finite."""
    model = net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, fused=fused)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    amp.backward(loss_of(model))
    if amp.plan.loss_scale is not None:
        with pytest.raises(StateError, match=r"SGD\.step\(\): the loss scale is still in its gradients"):
            optimizer.base_optimizer.step()
    optimizer.zero_grad()
    amp.backward(loss_of(model) * math.nan)
    amp.unscale_(optimizer)
    optimizer.base_optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert amp.skipped_steps == 1
    optimizer.zero_grad()
    while amp.skipped_steps < 9:
        amp.backward(loss_of(model))
        amp.unscale_(optimizer)
        counted = amp.skipped_steps
        optimizer.base_optimizer.step()
        optimizer.zero_grad()
        if amp.skipped_steps == counted:
            break
    assert not all(map(torch.equal, before, model.parameters()))
    amp.close()
    assert not optimizer.base_optimizer._optimizer_step_pre_hooks
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.base_optimizer.step()
    assert model[0].weight.isnan().all()
