"""Tiny workloads for tests, found by path in the test's process and in the processes it starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from castwise import Workload


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def _optimizer(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randn(32, 8, generator=draw, device="cpu")  # independent of the default device
        yield inputs, inputs.sum(1, keepdim=True).tanh()


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    device = next(model.parameters()).device
    inputs, targets = (tensor.to(device) for tensor in batch)
    return nn.functional.mse_loss(model(inputs), targets)


def _evaluate(model: nn.Module) -> dict[str, float]:
    assert not model.training
    return {"error": float(_loss(model, next(_batches(99))))}


def _picture(model: nn.Module) -> dict[str, torch.Tensor]:
    inputs = torch.linspace(-1, 1, 8, device=next(model.parameters()).device).repeat(200 * 3, 1)
    return {"target": torch.ones(200, 3), "prediction": model(inputs).reshape(200, 3)}


mlp = Workload("mlp", _model, _optimizer, _batches, _loss, _evaluate, "a small MLP", _picture)


# --- seeded faults ------------------------------------------------------------------------------------------


class SlowInLow(nn.Linear):
    """A model that does far more work under autocast, like fp16 convolutions on a CPU."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(inputs.device.type):
            for _ in range(600):
                torch.linalg.eigvalsh(torch.eye(64, device="cpu"))
        return super().forward(inputs)


class BreaksInLow(nn.Linear):
    """A model that raises in its third call under autocast."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(inputs.device.type):
            self.calls += 1
            if self.calls == 3:
                raise FloatingPointError("a kernel\nthat cannot")
        return super().forward(inputs)


class Hoarder(nn.Linear):
    """A model that holds 4 MiB more during its forward pass."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        extra = torch.zeros(2**20, device=inputs.device)
        return super().forward(inputs) + extra[0]


def _not_scalar(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(batch[0])


def _nan_batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for inputs, targets in _batches(seed):
        yield inputs * float("nan"), targets


def _three_batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    batches = _batches(seed)
    yield from (next(batches) for _ in range(3))


def _with(layer: type[nn.Linear]) -> Workload:
    return replace(
        mlp, name=layer.__name__, model=lambda: nn.Sequential(layer(8, 16), nn.ReLU(), nn.Linear(16, 1))
    )


plain = _with(nn.Linear)
slow_in_low = _with(SlowInLow)
breaks_in_low = _with(BreaksInLow)
hoarder = _with(Hoarder)
not_scalar = replace(mlp, loss=_not_scalar)
nan_data = replace(mlp, batches=_nan_batches)
three = replace(mlp, batches=_three_batches)
bracketed = replace(mlp, name="[/x]")
