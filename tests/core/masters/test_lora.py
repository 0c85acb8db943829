"""A frozen low-precision base with trained LoRA weights, under every plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import castwise
from tests.core.masters.presets import ALL
from tests.core.masters.test_masters_optimizers import batches
from tests.here import DEVICE
from tests.soak import each_value


class LoRA(nn.Module):
    """A frozen layer with a trainable low-rank correction, made before prepare."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        low = self.base(x.to(self.base.weight.dtype))
        return low + nn.functional.linear(nn.functional.linear(x.to(self.A.dtype), self.A), self.B)

    def merged(self) -> Tensor:
        return self.base.weight.detach().float() + (self.B @ self.A).detach().float()


def adapted(base_dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [LoRA(nn.Linear(8, 16).to(base_dtype)), nn.ReLU(), LoRA(nn.Linear(16, 4).to(base_dtype))]
    return nn.Sequential(*layers)


@each_value()
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", ALL)
def test_lora_prepares_trains_saves_closes_and_merges(plan: str, base: torch.dtype) -> None:
    """Covers a base in fp32, which the plan may store low, and a base that is low before prepare."""
    model = adapted(base)
    before = {k: v.detach().clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    for x in batches(3):
        amp.backward((model(x).float() - 1).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()
    saved = {k: v.detach().clone() for k, v in amp.model_state_dict(model).items()}
    assert {v.dtype for v in saved.values()} == {torch.float32}
    amp.close()
    for key, value in model.state_dict().items():
        if "base" in key:
            assert value.dtype is base
            assert torch.equal(value, before[key])
            assert torch.equal(saved[key], before[key].float())
        else:
            assert not torch.equal(value, before[key])
            assert torch.equal(value.float(), saved[key])
    assert torch.isfinite(model[0].merged()).all()
