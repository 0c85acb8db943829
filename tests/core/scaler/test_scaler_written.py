"""Weights written from non-finite gradients, and optimizers inside others."""

from __future__ import annotations

import functools
import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import castwise
from castwise.core.scaler import inside
from castwise.core.session.amp import SessionView
from castwise.errors import StateError
from tests.core.masters.outside import SAM
from tests.here import DEVICE


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


X = torch.randn(8, 4, generator=torch.Generator(DEVICE).manual_seed(1))
PLANS = ["fp16-mixed", "fp16-master", "bf16-mixed", "bf16-master", "fp32"]


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_a_bad_pass_skips_both_of_sams_steps(plan: str, bad: int, data: bool) -> None:
    """Weights, momentum and losses equal a training without that step. ``bad``: 0 for the first pass, 1 for the second,
    2 for both.
    """
    found = []
    for leaves_out in (False, True):
        model = net()
        optimizer = SAM(model.parameters(), SGD, lr=0.1, rho=0.05, data=data, momentum=0.9)
        amp = castwise.Amp(plan, device=DEVICE)
        amp.prepare(model, optimizer)
        losses = []
        for step in range(5):
            if step == 2 and leaves_out:
                continue
            for number, move in enumerate((optimizer.first_step, optimizer.second_step)):
                loss = model(X).square().mean()
                losses += [loss.item()] if step != 2 else []
                assert math.isfinite(loss.item())
                amp.backward(loss * (math.inf if step == 2 and bad in (number, 2) else 1.0))
                amp.unscale_(optimizer)
                move(zero_grad=True)
        assert amp.skipped_steps == (not leaves_out)
        found.append((losses, [p.detach().clone() for p in model.parameters()]))
    (losses, weights), (expected, plain) = found
    rtol = 1e-6 if bad == 0 or data else 1e-3  # p + e - e rounds
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(weights, plain, rtol=rtol * 10, atol=1e-5)


def test_no_copy_is_made_without_an_overflow() -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    amp = castwise.Amp("fp16-mixed", device=DEVICE)
    amp.prepare(model, optimizer)
    written = SessionView(amp).window.written
    for factor, copies in ((1.0, 0), (math.inf, int(DEVICE == "cpu")), (1.0, 0)):
        amp.backward(model(X).square().mean() * factor)
        amp.unscale_(optimizer)
        assert len(written.overflows) == copies
        amp.step(optimizer)
        optimizer.zero_grad()
    assert amp.skipped_steps == 1


def test_copies_end_with_the_step_that_is_skipped() -> None:
    model = net()
    optimizer = SAM(model.parameters(), SGD, lr=0.1)
    amp = castwise.Amp("fp16-mixed", device=DEVICE)
    amp.prepare(model, optimizer)
    written = SessionView(amp).window.written
    for factor, copies in ((math.inf, 1), (1.0, 1), (1.0, 0)):
        amp.backward(model(X).square().mean() * factor)
        amp.unscale_(optimizer)
        assert len(written.overflows) == copies
        (optimizer.second_step if factor == 1.0 and copies else optimizer.first_step)(zero_grad=True)


class Around(Optimizer):
    """Holds the objects it is given."""

    def __init__(self, inner: Any, groups: Any) -> None:
        super().__init__(groups, {})
        self.inner = inner


HOLDS = {
    "itself": lambda o: o,
    "a list": lambda o: [o],
    "nested": lambda o: {"a": ([deque([o])],)},
    "an object": lambda o: SimpleNamespace(held=SimpleNamespace(o=o)),
    "a method": lambda o: o.step,
    "a partial": lambda o: functools.partial(o.step, None),
    "a closure": lambda o: lambda: o.step(),
}


@pytest.mark.parametrize("how", HOLDS)
def test_an_optimizer_inside_another_is_found(how: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    inner, stranger = SGD([parameter], 0.1), SGD([nn.Parameter(torch.ones(2))], 0.1)
    assert inside(Around(HOLDS[how](inner), inner.param_groups)) == [inner]
    assert inside(Around(HOLDS[how](stranger), inner.param_groups)) == []
    assert inside(Around(HOLDS[how](Around(inner, inner.param_groups)), inner.param_groups))[1:] == [inner]


@pytest.mark.parametrize("plan", ["fp16-master", "bf16-master"])
def test_groups_apart_from_those_inside_are_refused_with_masters(plan: str) -> None:
    model = net()
    inner = SGD(model.parameters(), 0.1)
    outer = Around([inner], [{"params": list(model.parameters())}])
    amp = castwise.Amp(plan, device=DEVICE)
    with pytest.raises(StateError) as error:
        amp.prepare(model, outer)
    assert str(error.value) == (
        "prepare: Around holds its parameters in groups of its own, not in those of the SGD inside it, which would not get the "
        f"fp32 masters of the plan {plan}. Prepare the SGD instead, and step by Around as before: amp.unscale_(inner), then "
        "outer.step(); or use a plan that keeps parameters in fp32, such as 'bf16-mixed'."
    )
    amp.prepare(model, inner)
    before = model(X).square().mean()
    amp.backward(before)
    amp.unscale_(inner)
    outer.inner[0].step()
    assert model(X).square().mean() < before
