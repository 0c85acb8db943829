"""Frozen models under plans that keep master weights in the optimizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import castwise
from castwise.errors import WorkloadError

PLANS = ("bf16-master", "fp16-master", "O2", "bf16-true", "bf16-mixed")


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


@pytest.mark.parametrize("plan", PLANS)
def test_compare_takes_a_frozen_model_and_one_without_parameters(plan: str) -> None:
    for model in (nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False), nn.Tanh()):
        for batch in (torch.randn(8, 4), torch.randn(8, 4, requires_grad=True)):
            assert isinstance(castwise.compare(model, loss, batch, "fp32", plan), castwise.Comparison)


@pytest.mark.parametrize("plan", PLANS)
def test_mismatch_takes_a_frozen_model(plan: str) -> None:
    """The result is the same as for a trainable model, because mismatch() does not train."""
    torch.manual_seed(0)
    model = Tokens()
    batches = [torch.randint(0, 16, (2, 5))]
    trained = castwise.mismatch(model, batches, plan, "fp32")
    frozen = castwise.mismatch(model.requires_grad_(False), batches, plan, "fp32")
    assert str(dataclasses.replace(frozen, environment={})) == str(
        dataclasses.replace(trained, environment={})
    )


@pytest.mark.parametrize("plan", PLANS)
def test_first_nonfinite_says_that_nothing_is_differentiable(plan: str) -> None:
    with pytest.raises(WorkloadError, match="the loss is not differentiable"):
        castwise.first_nonfinite(nn.Linear(4, 4).requires_grad_(False), loss, torch.randn(8, 4), plan)
