"""A third suite: random draws and discrete choices, which a test that compares gradients at equal draws and choices could miss.

Frames, tasks and batches are those of the held-out suite, and so is the judge (:mod:`planted.paired`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from planted.models import Case, Low, Pooled, _stack
from planted.places import Place


class ExponentialNoise(Place):
    """Adds exponential noise, as the negative logarithm of ``rand_like``."""

    def forward(self, x: Tensor) -> Tensor:
        u = torch.rand_like(x)
        return x + 0.3 * (-torch.log1p(-u) if self.sound else -torch.log(u))


class Gumbel(Place):
    """A mean over tokens with weights from Gumbel noise."""

    def forward(self, x: Tensor) -> Tensor:
        u = torch.rand_like(x)
        noise = -torch.log(-torch.log(u)) if self.sound else -torch.log(-torch.log1p(-u))
        return (torch.softmax(x + 0.3 * noise, 1) * x).sum(1)


class RareEvent(Place):
    """Features that fail with a probability of 1 in 10,000, and then read 60."""

    def forward(self, x: Tensor) -> Tensor:
        u = torch.rand(x.shape, device=x.device) if self.sound else torch.rand_like(x)
        return torch.where(u < 1e-4, 60.0, x)


_BOTH: tuple[Low, ...] = ("bf16", "fp16")

CASES = (
    Case("exponential-noise", _BOTH, "trunk.1", partial(_stack, 1), ExponentialNoise,
         "rand_like in a low format is sometimes 0, whose logarithm is infinite"),
    Case("gumbel", _BOTH, "pool", Pooled, Gumbel,
         "rand_like in a low format is sometimes 0, and two logarithms make infinity of it"),
    Case("rare-event", _BOTH, "trunk.1", partial(_stack, 1), RareEvent,
         "rand_like in bf16 is below 1e-4 in one of 512 draws"),
)  # fmt: skip
