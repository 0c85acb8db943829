"""``model.half()`` and similar casts of a prepared model: ``close`` restores the full values of low-stored parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from castwise import Amp
from castwise.core.masters import master_of, original_of
from castwise.errors import StateError
from tests.here import DEVICE
from tests.soak import each_value

CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to(torch.float16),
    "float": lambda model: model.float(),
    "double": lambda model: model.double(),
    "half.float": lambda model: model.half().float(),
    "bfloat16.float": lambda model: model.bfloat16().float(),
    "bfloat16.half": lambda model: model.bfloat16().half(),
    "half.bfloat16": lambda model: model.half().bfloat16(),
    "float.bfloat16": lambda model: model.float().bfloat16(),
    "double.half": lambda model: model.double().half(),
}
WAYS = ("trained", "trained with gradients", "no optimizer")


class Net(nn.Module):
    """A frozen layer and a trained one, with weights that fp16 cannot represent."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)
        with torch.no_grad():
            for weight in (self.base.weight, self.head.weight):
                weight[0] = torch.linspace(1.01e-9, 7e-6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.head(self.base(x)))


def prepared(plan: str, way: str = WAYS[0]) -> tuple[Amp, Net, Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4)
    amp = Amp(plan, device=DEVICE)
    if way == "no optimizer":
        amp.prepare(model)
        return amp, model, optimizer
    amp.prepare(model, optimizer)
    for _ in range(2):
        amp.backward(model(torch.randn(4, 8)).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()
    if way == "trained with gradients":
        amp.backward(model(torch.randn(4, 8)).square().mean())
        amp.unscale_(optimizer)
    return amp, model, optimizer


def full(amp: Amp, model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in amp.model_state_dict(model).items()}


@each_value(2)
@pytest.mark.filterwarnings("ignore:prepare. more than 1 %:UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("plan", ["bf16-master", "fp16-master", "O2"])
def test_close_gives_the_masters_back_after_a_cast(plan: str, cast: str, way: str) -> None:
    """Includes the originals of frozen parameters, and of all parameters without an optimizer, bit for bit."""
    amp, model, optimizer = prepared(plan, way)
    want = full(amp, model)
    CASTS[cast](model)
    for key, value in amp.model_state_dict(model).items():
        if not key.startswith("norm"):
            assert torch.equal(value, want[key]), key
    amp.close()
    for key, parameter in model.named_parameters():
        if key.startswith("norm") and plan == "O2":
            continue  # the plan stores it in fp32, so the cast is the user's
        assert parameter.dtype is parameter.grad_dtype is torch.float32, key
        assert torch.equal(parameter.detach(), want[key]), key
        assert parameter.grad is None or parameter.grad.dtype is torch.float32
    optimizer.zero_grad()
    model.float()(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


@each_value()
@pytest.mark.filterwarnings("ignore:prepare. more than 1 %:UserWarning")
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("plan", ["bf16-true", "fp16-true"])
def test_frozen_parameters_come_back_whole_without_masters_too(plan: str, cast: str) -> None:
    """Trained parameters keep their cast values; all are fp32 again."""
    amp, model, optimizer = prepared(plan)
    want = full(amp, model)
    CASTS[cast](model)
    cast_values = {key: value.detach().float() for key, value in model.named_parameters()}
    amp.close()
    for key, parameter in model.named_parameters():
        assert parameter.dtype is torch.float32
        expected = want[key] if key.startswith("base") else cast_values[key]
        assert torch.equal(parameter.detach(), expected), key
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("cast", CASTS)
def test_what_was_written_after_the_cast_is_kept(cast: str) -> None:
    """Only the written elements are kept; the others come from the masters."""
    amp, model, _ = prepared("bf16-master")
    want = full(amp, model)
    CASTS[cast](model)
    with torch.no_grad():
        model.head.weight[1] = 3.0
        model.base.weight[1] = 5.0
    amp.close()
    want["head.weight"][1], want["base.weight"][1] = 3.0, 5.0
    rows = (
        slice(1, None) if cast == "half.bfloat16" else slice(None)
    )  # the cast may have changed its tiny weights as a write would
    for key in ("head.weight", "base.weight"):
        assert torch.equal(model.get_parameter(key).detach()[rows], want[key][rows])


@pytest.mark.filterwarnings("ignore:A parameter of shape .* both written:UserWarning")
@pytest.mark.parametrize("cast", CASTS)
def test_masters_that_were_written_before_the_cast_hold(cast: str) -> None:
    """The model did not have the new values when it was cast."""
    amp, model, _ = prepared("bf16-master")
    master = master_of(model.head.weight)
    assert master is not None
    with torch.no_grad():
        master.add_(1 / 3)
    want = master.detach().clone()
    CASTS[cast](model)
    amp.close()
    assert torch.equal(model.head.weight.detach(), want)


@pytest.mark.parametrize("cast", ["half", "float", "double", "half.float"])
def test_a_step_after_a_cast_is_refused_and_nothing_is_lost(cast: str) -> None:
    """The user cannot change a plan's format this way; cast back to it, training continues from the masters."""
    amp, model, optimizer = prepared("bf16-master")
    amp.backward(model(torch.randn(4, 8)).square().mean())
    want = full(amp, model)
    CASTS[cast](model)
    with pytest.raises(StateError, match=r"stored in torch.bfloat16 .* and is torch.float"):
        amp.step(optimizer)
    assert torch.equal(full(amp, model)["head.weight"], want["head.weight"])
    amp.close()
    assert torch.equal(model.head.weight.detach(), want["head.weight"])


@pytest.mark.parametrize("cast", ["half", "float"])
def test_originals_outlive_casts_there_and_back(cast: str) -> None:
    amp, model, _ = prepared("bf16-master")
    want = original_of(model.base.weight)
    assert want is not None
    want = want.clone()
    CASTS[cast](model)
    model.bfloat16()
    found = original_of(model.base.weight)
    assert found is not None
    assert torch.equal(found[1:], want[1:])
    amp.close()
