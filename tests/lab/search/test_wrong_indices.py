"""The search keeps a module in fp32 if a low format changes its integer results."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import castwise


class Positions(nn.Module):
    """Position embeddings from a fixed table, with the positions counted in the format of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", 0.02 * torch.randn(512, 16))
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
        return x + self.table[(ones.cumsum(0, dtype=x.dtype) - 1).long()]


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).mean(1), batch[1])


def test_a_module_with_wrong_indices_is_kept_in_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Positions(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    prototypes = torch.randn(4, 1, 16)
    labels = [torch.randint(4, (4,)) for _ in range(40)]
    batches = [(prototypes[label] + torch.randn(4, 400, 16), label) for label in labels]
    found = castwise.tune(
        model=model, loss=_loss, batches=batches, optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
        goal="numerics", formats=("bf16",), budget_s=120,
    )  # fmt: skip
    assert found.plan.compute == "bf16"
    assert [(region.pattern, region.compute) for region in found.plan.regions] == [("1", "fp32")]
