"""Parameters without a master get back their full-precision values."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.core.masters import (
    attach,
    attachment_of,
    forget_original,
    fp32_state_dict,
    master_of,
    move_state,
    original_of,
    remember_original,
    restore,
    store,
)
from castwise.core.masters.originals import _originals
from tests.core.masters.test_masters_optimizers import Weights, batches, lower, train
from tests.core.masters.test_masters_state import STATEFUL
from tests.here import DEVICE


def test_a_later_master_starts_from_the_original() -> None:
    """After unfreezing and ``add_param_group``; values changed by hand are read from the parameter."""
    model = Weights()
    kept = [p.detach().clone() for p in model.parameters()]
    former = lower(model, torch.bfloat16)
    model.a.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([model.a.weight], lr=0.0)
    attach(optimizer, model, originals=former)
    with torch.no_grad():
        model.a.weight[0] = 2.0
    assert torch.equal(fp32_state_dict(model)["b.weight"], kept[1])
    assert torch.equal(fp32_state_dict(model)["a.weight"][1:], kept[0][1:])
    model.a.weight.requires_grad_(True)
    optimizer.add_param_group({"params": [model.b.weight]})
    model(batches(1)[0]).square().mean().backward()
    for parameter, want in zip(model.parameters(), kept, strict=True):
        master = master_of(parameter)
        assert master is not None
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32
        assert torch.equal(master[1:].detach(), want[1:])
        assert original_of(parameter) is None
    assert (master_of(model.a.weight)[0] == 2).all()  # type: ignore[index]


def test_restore_is_exact() -> None:
    """Restores values, dtype, gradient and grad_dtype."""
    parameter = nn.Parameter(torch.randn(4, 4))
    kept = parameter.detach().clone()
    former = parameter.detach()
    parameter.data = parameter.data.to(torch.float16)
    remember_original(parameter, former)
    parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        parameter[0] = 0.5
    assert restore(parameter)
    assert parameter.dtype is torch.float32
    assert torch.equal(parameter[1:].detach(), kept[1:])
    assert (parameter[0] == 0.5).all()
    assert parameter.grad_dtype is torch.float32
    assert parameter.grad.dtype is torch.float32
    assert not restore(parameter)


def test_nothing_is_remembered_where_nothing_was_lost() -> None:
    """Nothing is kept for fp32 parameters, exact values, freed parameters, or after forgetting or a change of shape."""
    wide = nn.Parameter(torch.ones(2))
    remember_original(wide, torch.ones(2, dtype=torch.float64))
    assert original_of(wide) is None
    low = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    remember_original(low, torch.ones(2, dtype=torch.bfloat16))
    assert original_of(low) is None
    remember_original(low, torch.ones(2))
    assert original_of(low) is not None
    forget_original(low)
    assert original_of(low) is None
    remember_original(low, torch.ones(2))
    low.data = torch.ones(3)
    assert original_of(low) is None
    gc.collect()
    known = len(_originals)
    low = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    remember_original(low, torch.ones(2))
    assert len(_originals) == known + 1
    del low
    gc.collect()
    assert len(_originals) == known


def test_detaching_without_writing_back_remembers_the_masters() -> None:
    """Attaching again, or restoring, then continues from full-precision values."""
    model = Weights()
    former = lower(model, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = attach(optimizer, model, originals=former)
    full = [m.detach().clone() for m in attachment.masters]
    attachment.detach()
    again = attach(optimizer, model)
    for master, want in zip(again.masters, full, strict=True):
        assert torch.equal(master.detach(), want)
    again.detach()
    for parameter, want in zip(model.parameters(), full, strict=True):
        assert restore(parameter)
        assert torch.equal(parameter.detach(), want)


def late(plan: str, scaler: Any) -> Any:
    torch.manual_seed(0)
    model = Weights()
    model.a.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([model.a.weight], lr=0.1, momentum=0.9)
    model.a.weight.requires_grad_(False)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    assert attachment_of(optimizer) is not None
    optimizer.add_param_group({"params": [model.b.weight]})
    for number, x in enumerate(batches(4)):
        if number == 2:
            model.a.weight.requires_grad_(True)
        loss = model(x).square().mean()
        if scaler is None:
            amp.backward(loss)
            amp.step(optimizer, max_norm=1.0)
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return amp, model, optimizer


@pytest.mark.parametrize("own", [True, False], ids=["Amp", "GradScaler"])
@pytest.mark.parametrize("plan", ["fp16-master", "O2", "naive", "bf16-master"])
def test_unfreezing_and_adding_work_under_a_loss_scale(plan: str, own: bool) -> None:
    """The gradients of the first backward afterwards are already fp32, so they can be unscaled."""
    scaler = None if own else torch.amp.GradScaler(DEVICE, init_scale=256.0)
    amp, model, optimizer = late(plan, scaler)
    for parameter in model.parameters():
        master = master_of(parameter)
        assert master is not None
        assert optimizer.state[parameter]["momentum_buffer"].dtype is torch.float32
        assert torch.equal(parameter.detach(), master.detach().to(parameter.dtype))
    amp.close()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_store_and_restore_undo_each_other(dtype: torch.dtype, sticky: bool, grads: bool) -> None:
    """Also if grad_dtype was set before, as on a parameter that once had a master."""
    parameter = nn.Parameter(torch.randn(4, 4))
    if sticky:
        parameter.grad_dtype = torch.float32
    if grads:
        parameter.grad = torch.randn(4, 4)
    full = parameter.detach().clone()
    for _ in range(2):
        store(parameter, dtype)
        assert parameter.dtype is dtype
        assert parameter.grad_dtype is dtype
        assert (parameter.grad is not None) == grads
        (parameter.float() * 2).sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.dtype is dtype
        if not grads:
            parameter.grad = None
        store(parameter, torch.float16)  # from one low format to another: uses the full-precision values
        assert torch.equal(parameter.detach(), full.half())
        assert restore(parameter)
        assert torch.equal(parameter.detach(), full)
        assert parameter.grad_dtype is torch.float32
        assert parameter.grad is None or parameter.grad.dtype is torch.float32


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL.keys())
def test_state_follows_parameters_that_are_stored_anew(make: Any) -> None:
    """Without masters, the state changes dtype with its parameters in both directions, as torch's kernels require."""
    model = Weights()
    optimizer = make(list(model.parameters()))
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for parameter in model.parameters():
            if dtype is torch.bfloat16:
                store(parameter, dtype)
            else:
                restore(parameter)
        move_state(optimizer, {parameter: parameter for parameter in model.parameters()})
        train(model, optimizer, 2)
        for parameter in model.parameters():
            for key, value in optimizer.state[parameter].items():
                assert key == "step" or not isinstance(value, torch.Tensor) or value.dtype is dtype
