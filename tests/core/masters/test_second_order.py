"""Gradients that have a graph, under every plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from tests.core.masters.outside import AdaHessian
from tests.core.masters.presets import ALL, MASTERS
from tests.core.masters.test_masters_optimizers import batches
from tests.here import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")


def fit(plan: str, steps: int) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = AdaHessian(model.parameters())
    losses = []
    with castwise.Amp(
        f"{plan}+loss_scale=none" if "fp16" in plan or plan[0] == "O" else plan, device=DEVICE
    ) as amp:
        amp.prepare(model, optimizer)
        for x in batches(1) * steps:
            loss = (model(x).float() - x[:, :1]).square().mean()
            amp.backward(loss, create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize("plan", [name for name in ALL if name.startswith(("bf16", "fp32"))])
def test_adahessian_learns_as_in_fp32(plan: str) -> None:
    """AdaHessian differentiates gradients by the parameters it holds, which are the masters."""
    losses, model = fit(plan, 12)
    exact, _ = fit("fp32", 12)
    assert losses[-1] < losses[0] / 2
    # bf16 rounds each gradient and each second derivative to 8 bits.
    assert losses[-1] == pytest.approx(exact[-1], rel=0.3, abs=0.02)
    assert all(p.dtype is torch.float32 or "true" in plan for p in model.parameters())


@pytest.mark.parametrize("plan", MASTERS)
def test_second_derivatives_by_masters_are_those_by_parameters(plan: str) -> None:
    """Also for a single master, and again after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unscaled = dataclasses.replace(castwise.Plan.preset(plan), loss_scale=None)
    with castwise.Amp(unscaled, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        for _ in range(2):
            model(batches(1)[0]).float().square().mean().backward(create_graph=True)
            masters = optimizer.param_groups[0]["params"]
            grads = [p.grad for p in masters]
            ones = [torch.ones_like(g) for g in grads]
            by_masters = torch.autograd.grad(grads, masters, grad_outputs=ones, retain_graph=True)
            by_stored = torch.autograd.grad(
                grads, list(model.parameters()), grad_outputs=ones, retain_graph=True
            )
            (alone,) = torch.autograd.grad(grads[0], masters[0], grad_outputs=ones[0], retain_graph=True)
            assert alone.shape == masters[0].shape
            for one, other in zip(by_masters, by_stored, strict=True):
                assert torch.equal(one, other)
            optimizer.step()
            optimizer.zero_grad()
