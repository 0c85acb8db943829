"""Every preset trains on a device that is not the CPU, equal to a hand-written loop, without extra synchronization."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import castwise
from castwise.core.plans.plan import PRESETS
from tests.here import DEVICE, no_waits, waits

NAMES = [name for name in PRESETS if name != "tf32"]  # the simulated device has no TF32
OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
    "fused sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, eps=1e-4),
    "fused adamw": lambda params: torch.optim.AdamW(params, 0.01, eps=1e-4, fused=True),
    "capturable adamw": lambda params: torch.optim.AdamW(params, 0.01, eps=1e-4, capturable=True),
}
FORMATS = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4), nn.Softmax(-1)
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(32, 16), torch.randint(4, (32,))


def loss_of(model: nn.Module) -> torch.Tensor:
    x, y = batch()
    return nn.functional.cross_entropy(5.0 * model(x), y)


def start(plan: str, maker: str) -> tuple[castwise.Amp, nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = OPTIMIZERS[maker](model.parameters())
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    return amp, model, optimizer


def train(plan: str, maker: str, steps: int) -> tuple[list[float], nn.Module]:
    amp, model, optimizer = start(plan, maker)
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        amp.backward(loss)
        amp.step(optimizer)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    amp.close()
    return losses, model


@pytest.mark.parametrize("maker", OPTIMIZERS)
@pytest.mark.parametrize("plan", NAMES)
def test_every_preset_learns(plan: str, maker: str) -> None:
    losses, _ = train(plan, maker, 15)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("maker", OPTIMIZERS)
@pytest.mark.parametrize("plan", FORMATS)
def test_mixed_plans_are_the_loop_by_hand_to_the_bit(plan: str, maker: str) -> None:
    found, prepared = train(plan, maker, 8)
    model = net()
    optimizer = OPTIMIZERS[maker](model.parameters())
    scaler = torch.amp.GradScaler(DEVICE, enabled=plan == "fp16-mixed")
    torch.manual_seed(2)
    losses = []
    for _ in range(8):
        with torch.autocast(DEVICE, dtype=FORMATS[plan]):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert found == losses
    for ours, theirs in zip(prepared.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("maker", OPTIMIZERS)
@pytest.mark.parametrize("plan", NAMES)
def test_how_often_a_step_waits_for_the_device(plan: str, maker: str) -> None:
    """Never with a fused optimizer, whose kernel can skip; once with others, where the host must skip the call."""
    amp, model, optimizer = start(plan, maker)
    x, y = batch()

    def step() -> None:
        amp.backward(nn.functional.cross_entropy(5.0 * model(x), y))
        amp.step(optimizer)
        optimizer.zero_grad()

    for _ in range(
        4
    ):  # plans without masters measure steps 1, 2, 4, ... 64 and every 64th later, and read the results
        step()
    if maker.startswith("fused"):
        with no_waits():
            for _ in range(3):
                step()
    elif DEVICE == "sim":
        before = waits()
        for _ in range(3):
            step()
        assert waits() - before <= 3
    amp.close()
