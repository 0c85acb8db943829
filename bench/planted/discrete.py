"""A third suite: faults in random draws and discrete choices.

A test that compares gradients at equal draws and choices could miss these. Frames, tasks, batches and the judge
(:mod:`planted.paired`) are those of the held-out suite.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from planted.models import CLASSES, Case, Low, Pooled, _indexed, _stack
from planted.places import Place


class ExponentialNoise(Place):
    """Addition of exponential noise, computed as the negative logarithm of ``rand_like``."""

    def forward(self, x: Tensor) -> Tensor:
        u = torch.rand_like(x)
        return x + 0.3 * (-torch.log1p(-u) if self.sound else -torch.log(u))


class Gumbel(Place):
    """A weighted mean over tokens, with Gumbel noise in the weights."""

    def forward(self, x: Tensor) -> Tensor:
        u = torch.rand_like(x)
        noise = -torch.log(-torch.log(u)) if self.sound else -torch.log(-torch.log1p(-u))
        return (torch.softmax(x + 0.3 * noise, 1) * x).sum(1)


class RareEvent(Place):
    """Features that are replaced by 60 with a probability of 1 in 10,000."""

    def forward(self, x: Tensor) -> Tensor:
        u = torch.rand(x.shape, device=x.device) if self.sound else torch.rand_like(x)
        return torch.where(u < 1e-4, 60.0, x)


def _coded(x: Tensor, index: Tensor) -> Tensor:
    """Add the one-hot code of integers modulo 16 to the features."""
    return x + functional.one_hot(index % 16, x.shape[-1]).to(x.dtype)


class Edges(Place):
    """A code of the interval between sorted edges that contains a number."""

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        dtype = torch.float32 if self.sound else x.dtype
        edges = torch.arange(4096, 8200, device=x.device).to(dtype)
        return _coded(x, torch.bucketize(number.to(dtype), edges))


class Counted(Place):
    """A code of positions, which are counted from the first token's position by a cumulative sum of ones."""

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        dtype = torch.float32 if self.sound else x.dtype
        ones = torch.ones(number.shape, device=x.device, dtype=dtype)
        ones[:, 0] = number[:, 0]
        return _coded(x, ones.cumsum(1, dtype=dtype).long())


class Matched(Place):
    """A code of a number modulo 16, computed as a mask by comparison with 0 to 15."""

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
