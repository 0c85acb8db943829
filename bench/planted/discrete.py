"""A third suite: random draws and discrete choices, which a test that compares gradients at equal draws and choices could miss.

Frames, tasks and batches are those of the held-out suite, and so is the judge (:mod:`planted.paired`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from planted.models import CLASSES, Case, Low, Pooled, _indexed, _stack
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


def _coded(x: Tensor, index: Tensor) -> Tensor:
    """Features with a code of whole numbers modulo 16 added."""
    return x + functional.one_hot(index % 16, x.shape[-1]).to(x.dtype)


class Edges(Place):
    """Codes the interval of sorted edges in which a number lies."""

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        dtype = torch.float32 if self.sound else x.dtype
        edges = torch.arange(4096, 8200, device=x.device).to(dtype)
        return _coded(x, torch.bucketize(number.to(dtype), edges))


class Counted(Place):
    """Codes positions that are counted from the first token's by adding up ones."""

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        dtype = torch.float32 if self.sound else x.dtype
        ones = torch.ones(number.shape, device=x.device, dtype=dtype)
        ones[:, 0] = number[:, 0]
        return _coded(x, ones.cumsum(1, dtype=dtype).long())


class Matched(Place):
    """Codes which of the numbers from 0 to 15 a number is, modulo 16, as a mask."""

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        each = number.to(torch.float32 if self.sound else x.dtype).unsqueeze(-1)
        mask = each % 16 == torch.arange(x.shape[-1], device=x.device)
        return torch.where(mask, x + 1.0, x)


_BOTH: tuple[Low, ...] = ("bf16", "fp16")

CASES = (
    Case("exponential-noise", _BOTH, "trunk.1", partial(_stack, 1), ExponentialNoise,
         "rand_like in a low format is sometimes 0, whose logarithm is infinite"),
    Case("gumbel", _BOTH, "pool", Pooled, Gumbel,
         "rand_like in a low format is sometimes 0, and two logarithms make infinity of it"),
    Case("rare-event", _BOTH, "trunk.1", partial(_stack, 1), RareEvent,
         "rand_like in bf16 is below 1e-4 in one of 512 draws"),
    Case("edges", _BOTH, "join", partial(_indexed, CLASSES), Edges,
         "edges of thousands are equal in a low format", "bucket"),
    Case("counted", _BOTH, "join", partial(_indexed, CLASSES), Counted,
         "a sum of thousands does not grow by ones", "bucket"),
    Case("matched", _BOTH, "join", partial(_indexed, CLASSES), Matched,
         "whole numbers of thousands are rounded to others", "bucket"),
)  # fmt: skip
