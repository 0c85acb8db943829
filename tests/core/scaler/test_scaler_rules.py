"""Steps that the user's own check leaves out, and consecutive skips with alternating optimizers and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.errors import LossScaleError, NonFiniteError
from tests.here import DEVICE
from tests.soak import each_value

FACTOR = 500.0
"""Multiplies the outputs, so that fp16 overflows at the first scales."""


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


class Two(nn.Module):
    """Two parts, one of which is called at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": net(), "b": net()})

    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.parts[name](x)


CLEAR: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "both": lambda model, optimizer: [optimizer.zero_grad(), model.zero_grad()],
    "hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}


def by_hand(steps: int) -> tuple[int, list[float]]:
    """Run the check in a torch.amp loop, calling update() with or without a step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(DEVICE)
    scales = []
    left_out = 0
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            out = model(torch.ones(2, 4))
        scaler.scale((out.float() * FACTOR).square().mean()).backward()
        scaler.unscale_(optimizer)
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            scaler.step(optimizer)
        else:
            left_out += 1
        scaler.update()
        scales.append(scaler.get_scale())
    return left_out, scales


@each_value(2)
@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-mixed+optimizer=fused"])
@pytest.mark.parametrize("clear", CLEAR)
@pytest.mark.parametrize("look", ["unscale_", "clip", "clip params"])
def test_a_users_own_rule_counts_as_an_overflow(plan: str, clear: str, look: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    scales: list[float] = []
    left_out = 0
    for step in range(40):
        amp.backward((model(torch.ones(2, 4)) * FACTOR).square().mean())
        if step:
            scales.append(amp.get_scale())
        if look == "clip":
            norm = amp.clip_grad_norm_(optimizer, 1.0)
        elif look == "clip params":
            norm = amp.clip_grad_norm_(model.parameters(), 1.0)
        else:
            amp.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not norm.isfinite():
            left_out += 1
            CLEAR[clear](model, optimizer)
            continue
        assert amp.step(optimizer)
        optimizer.zero_grad()
    assert (left_out, scales) == (by_hand(40)[0], by_hand(40)[1][:-1])
    assert 0 < left_out < 40
    assert amp.skipped_steps == left_out
    amp.close()


@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-mixed+optimizer=fused", "fp16-master"])
@pytest.mark.parametrize("several", [False, True])
def test_gradients_that_were_returned_and_left_count_as_an_overflow(plan: str, several: bool) -> None:
    """Optionally, a second optimizer steps in each round on its own loss."""
    model, other = net(), net()
    optimizer, healthy = (torch.optim.SGD(m.parameters(), 1e-3) for m in (model, other))
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    if several:
        amp.prepare(other, healthy)
    params = [*model.parameters()]
    scales: list[float] = []
    left_out = 0
    for step in range(40):
        if step:
            scales.append(amp.get_scale("it" if several else "loss"))
        loss = (model(torch.ones(2, 4)) * FACTOR).square().mean()
        grads = amp.grad(loss, params, name="it" if several else None)
        if all(grad.isfinite().all() for grad in grads):
            for parameter, grad in zip(params, grads, strict=True):
                parameter.grad = grad
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            left_out += 1
        if several:
            amp.backward(other(torch.ones(2, 4)).mean())
            assert amp.step(healthy)
            healthy.zero_grad()
    assert (left_out, scales) == (by_hand(40)[0], by_hand(40)[1][:-1])
    assert 0 < left_out < 40
    assert amp.skipped_steps == left_out
    amp.close()


def test_returned_gradients_of_inputs_and_with_a_graph_move_no_scale() -> None:
    """An overflow in them shows at the next step."""
    model = net()
    amp = castwise.Amp("fp16-mixed", device=DEVICE)
    amp.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
    x = torch.full((2, 4), math.inf, requires_grad=True)
    for inputs, graph in ([x], False), ([*model.parameters()], True):
        (bad, *_) = amp.grad(model(x).square().mean(), inputs, create_graph=graph)
        assert not bad.isfinite().all()
        amp.backward(model(torch.ones(2, 4)).mean())
        assert amp.get_scale() == 65536.0
    assert amp.skipped_steps == 0


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-master", "bf16-true"])
@pytest.mark.parametrize("clear", CLEAR)
@pytest.mark.parametrize("look", ["unscale_", "clip", "clip params"])
def test_a_users_own_rule_is_counted_without_a_scale_too(plan: str, clear: str, look: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    for step in range(6):
        amp.backward(model(torch.ones(2, 4)).mean() * (math.nan if step % 2 else 1.0))
        if look == "unscale_":
            amp.unscale_(optimizer)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        else:
            norm = amp.clip_grad_norm_(optimizer if look == "clip" else model.parameters(), 1.0)
        if norm.isfinite():
            assert amp.step(optimizer)
            optimizer.zero_grad()
        else:
            CLEAR[clear](model, optimizer)
    amp.backward(model(torch.ones(2, 4)).mean())
    assert amp.skipped_steps == 3
    amp.close()


def test_finite_gradients_that_a_rule_leaves_out_change_nothing() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    amp = castwise.Amp("fp16-mixed+loss_scale.init=8+loss_scale.interval=3", device=DEVICE)
    amp.prepare(model, optimizer)
    for _ in range(9):
        amp.backward(model(torch.ones(2, 4)).square().mean())
        amp.unscale_(optimizer)
        optimizer.zero_grad()
    amp.backward(model(torch.ones(2, 4)).square().mean())
    assert (amp.get_scale(), amp.skipped_steps) == (8.0, 0)


@pytest.mark.parametrize("clear", ["optimizer", "zeros", "model"])
def test_a_state_saved_right_after_a_step_was_left_out_has_the_scale_that_comes(clear: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    amp = castwise.Amp("fp16-mixed", device=DEVICE)
    amp.prepare(model, optimizer)
    amp.backward(model(torch.ones(2, 4)).sum() * math.inf)
    amp.unscale_(optimizer)
    CLEAR[clear](model, optimizer)
    for _ in range(2):  # reading the counts changes nothing
        assert amp.get_scale() == amp.state_dict()["scaler"]["scale"] == 2.0**15
    amp.backward(model(torch.ones(2, 4)).sum())
    assert amp.get_scale() == 2.0**15


def test_an_optimizer_that_keeps_its_gradients_is_rescaled_when_another_is_left_out() -> None:
    model = Two()
    a, b = (torch.optim.SGD(model.parts[name].parameters(), 1.0) for name in "ab")
    amp = castwise.Amp("fp16-mixed+loss_scale.init=64", device=DEVICE)
    amp.prepare(model, a, b)
    plain = net()
    for factor in (math.inf, 1.0):
        amp.backward(model("a", torch.ones(2, 4)).sum() * factor + model("b", torch.ones(2, 4)).sum())
        plain(torch.ones(2, 4)).sum().backward()
        if factor != 1.0:
            amp.unscale_(a)
            a.zero_grad()
    assert amp.get_scale() == 32.0
    amp.unscale_(b)
    for mine, theirs in zip(model.parts["b"].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_what_is_set_after_a_rule_cleared_is_stepped_by_itself() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    amp = castwise.Amp("fp16-mixed", device=DEVICE)
    amp.prepare(model, optimizer)
    for step in (amp.step, lambda _: optimizer.step()):
        amp.backward(model(torch.ones(2, 4)).sum() * math.inf)
        amp.unscale_(optimizer)
        optimizer.zero_grad(set_to_none=False)
        before = model.weight.detach().clone()
        for parameter in model.parameters():
            parameter.grad.fill_(0.5)
        step(optimizer)
        assert torch.equal(model.weight.detach(), before - 0.5)
        optimizer.zero_grad()
    amp.backward(model(torch.ones(2, 4)).sum())
    assert amp.skipped_steps == 2
    assert amp.get_scale() == 2.0**14


# --- consecutive skips -----------------------------------------------------------------------------------------


def taking_turns(plan: Any, way: str, steps: int, names: tuple[str, str] = ("loss", "loss")) -> castwise.Amp:
    """Alternate two optimizers, one of which never has finite gradients."""
    model = Two()
    a, b = (torch.optim.SGD(model.parts[name].parameters(), 1e-3) for name in "ab")
    amp = castwise.Amp(plan, device=DEVICE, patience=5)
    amp.prepare(model, a, b)
    x = torch.ones(2, 4)
    for _ in range(steps):
        if way == "one window":
            amp.backward(model("a", x).square().mean() + model("b", x).square().mean() * math.nan)
            amp.step(a)
            amp.step(b)
        else:
            for name, optimizer, loss, factor in (("a", a, names[0], 1.0), ("b", b, names[1], math.nan)):
                amp.backward(model(name, x).square().mean() * factor, loss)
                if way == "direct":
                    amp.unscale_(optimizer)
                    optimizer.step()
                else:
                    amp.step(optimizer, max_norm=1.0 if way == "max_norm" else None)
                optimizer.zero_grad()
        a.zero_grad()
        b.zero_grad()
    return amp


@each_value(2)
@pytest.mark.parametrize(
    "plan",
    [
        "fp32",
        "bf16-mixed",
        "bf16-master",
        "fp16-mixed+loss_scale.floor=1024",
        "fp16-mixed+loss_scale.floor=1024+optimizer=fused",
        "fp16-mixed+loss_scale.dynamic=false",
        "fp16-master+loss_scale.floor=1024",
    ],
)
@pytest.mark.parametrize("way", ["turns", "max_norm", "direct", "one window", "names"])
def test_one_optimizer_that_never_steps_is_an_error_beside_one_that_does(plan: str, way: str) -> None:
    names = ("one", "other") if way == "names" else ("loss", "loss")
    with pytest.raises((LossScaleError, NonFiniteError), match=r"step\(SGD\).*not finite"):
        taking_turns(plan, way, 30, names).close()


def test_one_loss_that_always_overflows_is_an_error_beside_one_that_does_not() -> None:
    """There is one optimizer, whose steps for the other loss succeed."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    amp = castwise.Amp("fp16-mixed+loss_scale.floor=1024", device=DEVICE, patience=5)
    amp.prepare(model, optimizer)

    def train(name: str, factor: float) -> None:
        amp.backward(model(torch.ones(2, 4)).square().mean() * factor, name)
        amp.step(optimizer)
        optimizer.zero_grad()

    def go_on() -> None:
        for _ in range(30):
            train("good", 1.0)
            train("bad", math.nan)

    words = r"not finite \d+ times in a row, and the loss scale of 'bad' is at its floor"
    with pytest.raises(LossScaleError, match=words):
        go_on()
    assert amp.get_scale("good") == 2.0**16


@pytest.mark.cpu  # on a device only the device knows of them, and the host does not wait
@pytest.mark.parametrize("plan", ["fp32", "fp16-mixed+loss_scale.floor=1024"])
def test_steps_that_a_rule_left_out_count_among_those_in_a_row(plan: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    amp = castwise.Amp(plan, device=DEVICE, patience=12)
    amp.prepare(model, optimizer)
    for _ in range(11):
        amp.backward(model(torch.ones(2, 4)).mean() * math.nan)
        amp.unscale_(optimizer)
        optimizer.zero_grad()
    amp.backward(model(torch.ones(2, 4)).mean() * math.nan)
    with pytest.raises((LossScaleError, NonFiniteError), match=r"not finite.*12"):
        amp.step(optimizer)
