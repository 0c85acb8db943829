"""Buffers under levels that cast the whole model; the originals used ``model.half()``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from castwise.bridges.compat.apex import amp
from castwise.bridges.compat.colossalai.plans import recipe_of
from castwise.core.session import Amp


class Standardised(nn.Module):
    """A model with vectors, an average and a counter in buffers, and BatchNorm with and without weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm, self.bare = nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False)
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("std", torch.rand(8) + 0.5)
        self.register_buffer("average", torch.zeros(8, 8))
        self.register_buffer("count", torch.arange(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (self.body(x) - self.mean) * self.std
        self.average.lerp_(self.body.weight.detach().to(self.average.dtype), 0.1)
        return self.head(self.bare(self.norm(h)).to(self.head.weight.dtype))


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: buffer.dtype for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def as_apex(keep: bool) -> dict[str, torch.dtype]:
    """Return the dtypes after Apex's ``convert_network``: half, except BatchNorm with weights if ``keep``."""
    model = copy.deepcopy(Standardised()).half()
    if keep:
        model.norm.float()
    return dtypes(model)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_apex_casts_buffers(level: str, low: torch.dtype) -> None:
    model = Standardised()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, cast_model_type=low, loss_scale=8.0, verbosity=0
    )
    want = {name: low if dtype is torch.float16 else dtype for name, dtype in as_apex(level == "O2").items()}
    assert dtypes(model) == want
    for _ in range(2):
        loss = model(torch.randn(4, 8)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert dtypes(model) == want
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("mode", "options", "keep"),
    [("naive", {}, False), ("apex", {"opt_level": "O2"}, True), ("apex", {"opt_level": "O3"}, False)],
)
def test_colossal_ai_casts_buffers(mode: str, options: dict[str, str], keep: bool) -> None:
    model = Standardised()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    session = Amp(recipe_of(mode, options).plan, device="cpu")
    session.prepare(model, optimizer)
    bare = {} if not keep else {name: torch.float32 for name in as_apex(False) if name.startswith("bare")}
    assert dtypes(model) == {**as_apex(keep), **bare}
    session.backward(model(torch.randn(4, 8)).square().mean())
    session.step(optimizer)
    session.close()
    assert set(dtypes(model).values()) == {torch.float32}
