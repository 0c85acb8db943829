"""What the programs beside this file train: a small net on numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

criterion = nn.CrossEntropyLoss()


class Net(nn.Module):
    """Two layers and a norm, ``[batch, inputs]`` to ``[batch, outputs]``."""

    def __init__(self, inputs: int = 16, outputs: int = 4) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(inputs, 32), nn.LayerNorm(32), nn.Linear(32, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(steps: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _ in range(steps):
        yield torch.randn(8, 16), torch.randint(4, (8,))
