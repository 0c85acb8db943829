"""Floating inputs of a model: rounded where no operator would cast them, with a warning where the rounding matters."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from castwise import Amp, Plan, Region
from tests.here import DEVICE

MASTERS = ("bf16-master", "fp16-master")
ROUNDS = ("bf16-true", "fp16-true", "O2", "O3", "naive")
TIMES = torch.tensor([988.49, 988.51])


class Denoiser(nn.Module):
    """Takes a noisy vector and a time, and keeps its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.scale = nn.Linear(8, 8), nn.LayerNorm(8), nn.Parameter(torch.ones(8))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, time: Any, *, extra: Any = None) -> torch.Tensor:
        self.seen = [x.detach(), time, extra]
        return self.norm(x) * self.scale + self.inner(x)

    def embed(self, time: torch.Tensor) -> torch.Tensor:
        return time.clone()


def prepared(plan: Any, **how: Any) -> tuple[Amp, Any, torch.optim.Optimizer]:
    model = Denoiser()
    amp = Amp(plan, device=DEVICE)
    return amp, *amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), **how)


@pytest.mark.parametrize("plan", [*MASTERS, "bf16-master+rules=cuda", "fp16-master+ops.exp=fp32"])
def test_inputs_pass_unrounded_where_operators_cast(plan: str) -> None:
    """Covers inputs by position, by name and in containers, and a named method; training continues."""
    amp, model, optimizer = prepared(plan, methods=("embed",))
    x = torch.randn(2, 8)
    amp.backward(model(x, {"t": [TIMES]}, extra=(TIMES, 3)).square().mean())
    amp.step(optimizer)
    assert model.seen[0] is not None
    assert torch.equal(model.seen[0], x)
    assert torch.equal(model.seen[1]["t"][0], TIMES)
    assert torch.equal(model.seen[2][0], TIMES)
    assert torch.equal(model.embed(TIMES), TIMES)


@pytest.mark.parametrize("plan", MASTERS)
def test_what_no_operator_takes_beside_low_weights_comes_as_fp32(plan: str) -> None:
    """fp64 is never autocast; it and the other low format become fp32, the latter exactly."""
    amp, model, optimizer = prepared(plan)
    compute = Plan.preset(plan).compute_dtype
    other = torch.float16 if compute is torch.bfloat16 else torch.bfloat16
    for dtype, inside in ((torch.float64, torch.float32), (other, torch.float32), (compute, compute)):
        x = torch.randn(2, 8).to(dtype)
        amp.backward(model(x, TIMES.double()).square().mean())
        assert model.seen[0].dtype is inside
        assert torch.equal(model.seen[0], x.to(inside))
        assert torch.equal(model.seen[1], TIMES)
        amp.step(optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize("plan", MASTERS)
def test_inputs_that_meet_low_parameters(plan: str) -> None:
    """Covers each operator that combines an input with a parameter, without a cast operator in between."""

    class Meets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.table = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat([x, self.table]) + self.token
            x = torch.where(x > 0, x, self.token)
            x = torch.lerp(x, self.table.repeat(2, 1), 0.5).addcmul(x, self.token.expand(8, 8))
            x = x.index_add(0, torch.arange(4), self.table)
            return x @ self.table.T

    model = Meets()
    amp = Amp(plan, device=DEVICE)
    amp.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    amp.backward(model(torch.randn(4, 8)).square().mean())


@pytest.mark.parametrize("plan", ROUNDS)
def test_a_plan_that_rounds_says_once_that_numbers_become_equal(plan: str) -> None:
    _, model, _ = prepared(plan)
    x = torch.randn(2, 8)
    with pytest.warns(
        UserWarning,
        match=r"distinct values of an input of shape \[2\] equal: 988\.49 and 988\.51 become",
    ):
        model(x, TIMES)
    model(x, TIMES)  # warnings are errors
    assert model.seen[1].dtype in (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    "numbers",
    [
        torch.arange(3000.0).view(-1, 1),
        torch.linspace(0, 1, 5000),
        torch.tensor([[70000.0, 70001.0]]) / 2,
        torch.full((4, 4), 4000.0) + torch.eye(4),
    ],
)
def test_numbers_that_matter(numbers: torch.Tensor) -> None:
    _, model, _ = prepared("fp16-true")
    with pytest.warns(UserWarning, match="become"):
        model(torch.randn(2, 8), numbers)


@pytest.mark.parametrize("plan", ["bf16-true", "O2"])
def test_no_false_alarm(plan: str) -> None:
    """Covers features, masks, representable whole numbers, integers, scalars, empty and constant inputs, and NaN."""
    inputs: list[Any] = [
        torch.randn(64, 3, 8, 8), torch.full((8, 8), -1e9).triu(), torch.arange(256.0), torch.arange(9999), torch.tensor(988.49),
        torch.zeros(0), torch.full((9,), 988.49), torch.tensor([float("nan"), float("inf"), 1.0]), torch.rand(32, 32) * 255, 3.0, None,
    ]  # fmt: skip
    for value in inputs:
        _, model, _ = prepared(plan)
        model(torch.randn(2, 8), value)


def test_only_the_first_calls_are_looked_at() -> None:
    _, model, _ = prepared("bf16-true")
    for _ in range(3):
        model(torch.randn(2, 8), torch.arange(4.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 8), TIMES)


def test_a_region_rounds_at_its_own_border() -> None:
    """A region's floating inputs are cast whatever surrounds it, as documented."""
    model = nn.Sequential(Wrapped())
    plan = dataclasses.replace(Plan.preset("bf16-master"), regions=(Region("0", compute="bf16"),))
    amp = Amp(plan, device=DEVICE)
    amp.prepare(model)
    model(torch.randn(2, 8))
    assert model[0].seen[0].dtype is torch.bfloat16


class Wrapped(Denoiser):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, None)
