"""After ``model.half()`` or a similar cast of a prepared model, the next training forward or step raises an error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from castwise import Amp
from castwise.core.model import stored
from castwise.errors import StateError
from tests.here import DEVICE

PLANS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-true")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "to": lambda m: m.to(torch.bfloat16),
    "to like": lambda m: m.to(torch.ones(1, dtype=torch.float64)),
    "type": lambda m: m.type(torch.float64),
    "_apply": lambda m: m._apply(lambda t: t.half() if t.is_floating_point() else t),
    "body": lambda m: m.body.to(torch.float16),
    "norm": lambda m: m.norm.to(torch.float16),
    "head": lambda m: m.head.double(),
    "data": lambda m: setattr(m.head.weight, "data", m.head.weight.data.double()),
}  # fmt: skip


def prepared(plan: str) -> tuple[Amp, Any, torch.optim.Optimizer]:
    amp, model = Amp(plan, device=DEVICE), Net()
    return amp, *amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))


def step(amp: Amp, model: nn.Module, optimizer: torch.optim.Optimizer, raw: bool = False) -> None:
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward() if raw else amp.backward(loss)
    optimizer.step() if raw else amp.step(optimizer)
    optimizer.zero_grad()


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("plan", PLANS)
def test_training_goes_no_step_further(plan: str, cast: str, raw: bool) -> None:
    if raw and plan.startswith("fp16"):
        pytest.skip("a backward without the scale is refused for that")
    amp, model, optimizer = prepared(plan)
    step(amp, model, optimizer, raw)
    before = {name: parameter.dtype for name, parameter in model.named_parameters()}
    CASTS[cast](model)
    values = copy.deepcopy(model.state_dict())
    if before == {name: parameter.dtype for name, parameter in model.named_parameters()}:
        step(amp, model, optimizer, raw)
        return
    with pytest.raises(
        (StateError, RuntimeError),
        match=r"(?s)stored in torch\..* when the model was prepared and is torch\.",
    ):
        step(amp, model, optimizer, raw)
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())  # fmt: skip


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "to", "_apply"])
def test_the_words(cast: str) -> None:
    _, model, optimizer = prepared("bf16-mixed")
    loss = model(torch.randn(4, 8)).square().mean()
    CASTS[cast](model)
    now = model.head.weight.dtype
    words = (
        f"body.weight was stored in torch.float32 when the model was prepared and is {now} now, as after model.half(), model.double() or "
        "model.to(dtype). Leave casting to the plan: cast the model back, or prepare it again after changing its dtype: "
        "amp.close(), then amp.prepare(model, optimizer)."
    )
    with pytest.raises(StateError) as error:
        model(torch.randn(4, 8))
    assert str(error.value) == f"forward of this Net: {words}"
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(StateError) as error:
        optimizer.step()
    assert str(error.value) == f"SGD.step(): {words}"
    del loss


def test_cast_back_training_goes_on_and_closed_and_prepared_again_too() -> None:
    amp, model, optimizer = prepared("bf16-mixed")
    model.double()
    with pytest.raises(StateError, match="forward of this Net"):
        step(amp, model, optimizer)
    model.float()
    step(amp, model, optimizer)
    model.double()
    amp.close()
    amp, model, optimizer = Amp("bf16-mixed", device=DEVICE), model, torch.optim.SGD(model.parameters(), 0.1)
    amp.prepare(model, optimizer)
    optimizer.zero_grad()
    amp.backward(model(torch.randn(4, 8).double()).square().mean())
    amp.step(optimizer)


def test_what_is_not_trained_may_be_cast() -> None:
    """Covers a frozen part, and inference. Once the frozen part is unfrozen, training raises an error."""
    amp, model, optimizer = prepared("bf16-mixed")
    model.body.requires_grad_(False)
    step(amp, model, optimizer)
    model.body.bfloat16()
    step(amp, model, optimizer)
    with torch.no_grad():
        copy.deepcopy(model).bfloat16()(torch.randn(4, 8))
    model.body.requires_grad_(True)
    with pytest.raises(StateError, match=r"body.weight was stored in torch.float32"):
        step(amp, model, optimizer)


def test_other_prepares_and_plans_of_the_session_count() -> None:
    """Covers an optimizer whose second model is prepared later, one that is made later, and a change of plan."""
    first, second = Net(), Net().bfloat16()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    amp = Amp("bf16-mixed", device=DEVICE)
    amp.prepare(first, optimizer)
    amp.prepare(second, optimizer, widen=True)
    late = torch.optim.SGD(first.parameters(), 0.1)
    x = torch.randn(4, 8)
    amp.backward((first(x) + second(x)).square().mean())
    amp.step(optimizer)
    amp.change("bf16-master")
    optimizer.zero_grad()
    amp.backward((first(x) + second(x)).square().mean())
    amp.step(optimizer)
    amp.change("fp32")
    optimizer.zero_grad()
    amp.backward((first(x) + second(x)).square().mean())
    amp.step(optimizer)
    amp.close()
    assert second.head.weight.dtype is torch.bfloat16
    late.step()


def test_an_optimizer_that_joins_later_is_looked_at() -> None:
    amp = Amp("bf16-mixed", device=DEVICE)
    model = amp.prepare(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.prepare(model, optimizer)
    loss = model(torch.randn(4, 8)).square().mean()
    model.half()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(StateError, match=r"body.weight was stored in torch.float32"):
        optimizer.step()
    del loss


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("there", "part"),
    [("half", ""), ("bfloat16", "body"), ("double", ""), ("to half", "norm"), ("to device", "")],
)
def test_a_cast_there_and_back_is_said_where_bits_are_lost(plan: str, there: str, part: str) -> None:
    """Casts the weights of a region, or of the whole model, between two steps; masters keep their values."""
    amp, model, optimizer = prepared(plan)
    step(amp, model, optimizer)
    if model.body.weight.dtype is not torch.float32 and not part:
        part = "body"  # the norm is stored in fp32, so the whole model has no single dtype to return to
    module = model.get_submodule(part)
    dtype = next(module.parameters()).dtype
    lossy = dtype is torch.float32 and there not in ("double", "to device")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        {
            "to half": lambda: module.to(torch.float16).to(dtype),
            "to device": lambda: module.to(DEVICE),
        }.get(there, lambda: getattr(module, there)().to(dtype))()
        step(amp, model, optimizer)
        module.to(dtype)
    said = [str(each.message) for each in seen if "and back, so the digits" in str(each.message)]
    assert len(said) == lossy, said
    amp.close()
    assert len(stored._stored) or not hasattr(nn.Module._apply, "__wrapped__")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.half().float()
