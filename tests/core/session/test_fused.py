"""Fused kernels update their parameters, except one that does not."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from castwise import Amp
from castwise.core import _torch
from castwise.errors import DeviceError
from tests.here import DEVICE

LOW = [torch.bfloat16, torch.float16]


def stepped(kind: Any, dtype: torch.dtype, fused: bool) -> torch.Tensor:
    parameter = nn.Parameter(torch.ones(100, dtype=dtype))
    parameter.grad = torch.full_like(parameter, 0.5)
    kind([parameter], lr=0.125, fused=fused).step()
    return parameter.detach()


@pytest.mark.cpu  # the defect is in the CPU kernel
@pytest.mark.parametrize("dtype", LOW)
def test_whether_torchs_fused_sgd_updates_low_parameters_on_a_cpu_is_known(dtype: torch.dtype) -> None:
    """Since torch 2.14 the kernel updates them."""
    right = torch.equal(stepped(SGD, dtype, fused=True), stepped(SGD, dtype, fused=False))
    assert right is _torch.optimizers.fused_sgd_updates_low()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "kind", [Adam, AdamW, *([Adagrad] if DEVICE != "cuda" else [])]
)  # there is no such kernel
def test_others_update_low_parameters(kind: Any, dtype: torch.dtype) -> None:
    fused = stepped(kind, dtype, fused=True)
    torch.testing.assert_close(fused, stepped(kind, dtype, fused=False))
    assert (fused < 1.0).all()


@pytest.mark.cpu  # the defect is in the CPU kernel
@pytest.mark.parametrize(
    ("line", "fused"),
    [
        ("bf16-true+optimizer=fused", False),
        ("bf16-true", True),
        ("O3", True),
    ],
)
def test_a_kernel_that_would_not_train_is_refused(
    line: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch.optimizers, "fused_sgd_updates_low", lambda: False)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = SGD(model.parameters(), lr=0.1, fused=fused)
    with Amp(line, device=DEVICE) as amp, pytest.raises(DeviceError, match="fused SGD does not update"):
        amp.prepare(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert bool(optimizer.param_groups[0]["fused"]) is fused


@pytest.mark.parametrize("line", ["bf16-master+optimizer=fused", "bf16-mixed+optimizer=fused"])
def test_with_fp32_to_step_on_it_trains(line: str) -> None:
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.1)
    with Amp(line, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        amp.backward(model(torch.ones(2, 8)).sum())
        amp.step(optimizer)
    assert (model.weight != before).all()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize(("plan", "eps", "said"), [
    ("fp16-true", 1e-8, True), ("O3", 1e-8, True), ("fp16-true", 1e-4, False), ("bf16-true", 1e-8, False),
    ("fp16-master", 1e-8, False), ("fp16-mixed", 1e-8, False),
])  # fmt: skip
def test_an_eps_that_is_zero_in_the_format_of_the_weights_is_said(
    kind: type[torch.optim.Optimizer], plan: str, eps: float, said: bool
) -> None:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), eps=eps)  # type: ignore[call-arg]
    with warnings.catch_warnings(record=True) as heard, Amp(plan, device=DEVICE) as amp:
        warnings.simplefilter("always")
        amp.prepare(model, optimizer)
        # Half of the weights have zero gradients.
        amp.scale(model(torch.tensor([[1.0, 0.0]])).sum()).backward()
        amp.unscale_(optimizer)
        amp.step(optimizer)
        assert all(p.isfinite().all() for p in model.parameters()) is not said
    assert ["eps=1e-08" in str(one.message) and "fp16-master" in str(one.message) for one in heard] == [
        True
    ] * said


@pytest.mark.parametrize("line", ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "bf16-true"])
def test_a_state_of_an_optimizer_that_was_not_fused_can_be_loaded(line: str) -> None:
    """The loaded options include fused=False, but the plan's choice applies."""

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        return model, AdamW(model.parameters(), 0.01)

    def train(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            amp.backward(model(torch.ones(3, 4)).square().mean())
            assert not amp.step(optimizer).skipped
            optimizer.zero_grad()

    with Amp(f"{line}+loss_scale.init=1024" if "fp16" in line else line, device=DEVICE) as amp:
        model, optimizer = fresh()
        amp.prepare(model, optimizer)
        train(amp, model, optimizer)
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    assert not saved["param_groups"][0]["fused"]
    model, optimizer = fresh()
    hooks = len(optimizer._optimizer_load_state_dict_post_hooks)
    with Amp(f"{line}+optimizer=fused" + "+loss_scale.init=1024" * ("fp16" in line), device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["fused"] is True
        train(amp, model, optimizer)
    assert not optimizer.param_groups[0]["fused"]
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == hooks
    assert all(float(state["step"]) == 4 for state in optimizer.state.values())
