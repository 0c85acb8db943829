"""Low-precision copies of weights: one per forward for a weight used often, never older than its weight."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import castwise
from castwise import Plan
from castwise.core import _torch
from castwise.core.casting import frames
from tests.here import DEVICE
from tests.soak import each_value

X = torch.linspace(-1, 1, 32).reshape(8, 4)
OVERRIDE = Plan(compute="bf16", ops={"layer_norm": "lower"})
NATIVE = Plan(compute="bf16")


class Net(nn.Module):
    """A layer with an overridden operator and one without, with optional recomputation in backward."""

    def __init__(self, recompute: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 4)
        self.recompute = recompute

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.out(self.norm(x)).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None:
            return self.part(x).square().sum()
        out: torch.Tensor = checkpoint(self.part, x, use_reentrant=self.recompute)
        return out.square().sum()


def train(model: Net, region: Any, around: str) -> list[torch.Tensor]:
    """Run three steps of fused AdamW that castwise is not told about; return the gradients of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    seen = []

    def step() -> None:
        x = X.clone().requires_grad_()
        if around == "forward":
            with region:
                loss = model(x)
        else:
            loss = model(x)
        loss.backward()
        seen.extend([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        if around == "step":
            with region:
                step()
        else:
            step()
    return seen


@each_value()
@pytest.mark.parametrize(
    "recompute", [None, False, True], ids=["stored", "checkpoint", "reentrant checkpoint"]
)
@pytest.mark.parametrize("plan", [OVERRIDE, NATIVE], ids=["override", "native"])
@pytest.mark.parametrize("around", ["forward", "step", "training", "prepared"])
def test_gradients_are_those_without_copies(around: str, plan: Plan, recompute: bool | None) -> None:
    want = train(Net(recompute), castwise.autocast(plan, device_type=DEVICE, cache_enabled=False), "forward")
    model = Net(recompute)
    region = castwise.autocast(plan, device_type=DEVICE)
    if around == "prepared":
        amp = castwise.Amp(plan, device=DEVICE)
        amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        got = train(model, None, around)
        amp.close()
    elif around == "training":
        with region:
            got = train(model, None, around)
    else:
        got = train(model, region, around)
    assert len(got) == len(want) == 12
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("plan", [OVERRIDE, NATIVE], ids=["override", "native"])
def test_a_region_on_another_thread_sees_the_step(plan: Plan) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    stepped, first = threading.Event(), threading.Event()
    found: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        return functional.layer_norm(X[:4], (4, 4), weight) + functional.linear(X[:4], weight)

    def work() -> None:
        with castwise.autocast(plan, device_type=DEVICE):
            found.append(forward())
            first.set()
            assert stepped.wait(10)
            found.append(forward())

    thread = threading.Thread(target=work)
    thread.start()
    assert first.wait(10)
    optimizer.step()
    stepped.set()
    thread.join()
    assert found[0].abs().sum() > 0
    assert torch.equal(found[1], torch.zeros_like(found[1]))


class Casts(_torch.tensors.OperatorMode):
    """Counts casts to bf16."""

    def __init__(self) -> None:
        super().__init__(self.see)
        self.count = 0

    def see(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.count += op is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16
        return op(*args, **kwargs)


def test_within_one_forward_a_weight_is_cast_once() -> None:
    weight, x = nn.Parameter(torch.ones(4)), X.bfloat16()
    with castwise.autocast(OVERRIDE, device_type=DEVICE), Casts() as casts:
        for _ in range(5):
            functional.layer_norm(x, (4,), weight)
    assert casts.count == 1


def test_no_copy_outlives_its_region() -> None:
    weight = nn.Parameter(torch.ones(4))
    with castwise.autocast(OVERRIDE, device_type=DEVICE):
        functional.layer_norm(X, (4,), weight)
        assert frames.thread.state.weights
    assert frames.thread.state.weights is None


def test_no_copy_leaves_a_transform() -> None:
    weight, exact = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4).double())
    with castwise.autocast(OVERRIDE, device_type=DEVICE):
        torch.func.grad(lambda x: functional.layer_norm(x, (4,), weight).float().sum())(X)
        functional.layer_norm(X, (4,), weight).float().sum().backward()
    functional.layer_norm(X.double(), (4,), exact).sum().backward()
    torch.testing.assert_close(weight.grad, exact.grad.float(), rtol=0.02, atol=0.02)


def test_a_compiled_optimizer_is_watched_too() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    with castwise.autocast(NATIVE, device_type=DEVICE):
        for want in (4.0, 0.0, -4.0):
            assert torch.equal(functional.linear(torch.ones(1, 4), weight).float(), torch.full((1, 4), want))
            step()
    torch._dynamo.reset()
