"""Fragile places of the held-out suite and their sound twins: modules without parameters, with one mistake each.

``sound=True`` computes the same function in a way that works with inputs in a low format. What makes a place fragile
(an offset, a gain, a count) arises inside the module. So its low inputs contain all that it needs, and computing only
this module in fp32 is a cure. Shapes are ``[batch, tokens, features]`` unless stated otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Place(nn.Module):
    """A function computed in a fragile or in a sound way."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.sound = sound

    def extra_repr(self) -> str:
        return f"sound={self.sound}"


class Variance(Place):
    """Normalization of values with a mean of 100, with the variance computed as E[x^2] - E[x]^2."""

    def forward(self, x: Tensor) -> Tensor:
        if self.sound:
            centred = x - x.mean(-1, keepdim=True)
            return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-3)
        y = x + 100.0
        mean = y.mean(-1, keepdim=True)
        variance = ((y * y).mean(-1, keepdim=True) - mean * mean).clamp_min(0)
        return (y - mean) * torch.rsqrt(variance + 1e-3)


class Sinusoid(Place):
    """Addition of sines and cosines of large positions, computed in the format of the features."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        dtype = torch.float32 if self.sound else x.dtype
        frequency = torch.linspace(0.9, 0.05, half, device=x.device).to(dtype)
        angle = position.to(dtype).unsqueeze(-1) * frequency
        return x + torch.cat((angle.sin(), angle.cos()), -1).to(x.dtype)


class Rotary(Place):
    """Rotation of pairs of features by large positions, with the angles in the format of the features."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        dtype = torch.float32 if self.sound else x.dtype
        frequency = (0.9 * torch.logspace(0, -1, x.shape[-1] // 2, device=x.device)).to(dtype)
        angle = position.to(dtype).unsqueeze(-1) * frequency
        sine, cosine = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)


class SmoothMaximum(Place):
    """Pooling of tokens by a hand-written log-mean-exp at a temperature of 0.1; returns ``[batch, features]``."""

    def forward(self, x: Tensor) -> Tensor:
        y = x / 0.1
        if self.sound:
            top = y.amax(1, keepdim=True).detach()
            return 0.1 * ((y - top).exp().mean(1).log() + top.squeeze(1))
        return 0.1 * y.exp().mean(1).log()


class Assignment(Place):
    """Softmax over energies with a common offset of 5000 that is not subtracted."""

    def forward(self, x: Tensor) -> Tensor:
        energy = x if self.sound else x + 5000.0
        return x.shape[-1] * functional.softmax(energy, -1) - 1.0


class Epsilon(Place):
    """Division by a root mean square that is zero at padding, with an epsilon of 1e-8."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if self.sound else x
        y = y * (torch.arange(x.shape[1], device=x.device) % 5 != 4).unsqueeze(-1)
        return (y / ((y * y).mean(-1, keepdim=True) + 1e-8).sqrt()).to(x.dtype)


class SquaredError(Place):
    """Scaling of each token by its mean squared error from its neighbour, computed in units of 1/255."""

    def forward(self, x: Tensor) -> Tensor:
        unit = 1.0 if self.sound else 255.0
        difference = unit * (x - x.roll(1, 1))
        error = (difference * difference).mean(-1, keepdim=True) / unit**2
        return x / (1.0 + error)


class PrefixSum(Place):
    """Means over windows of tokens, computed as differences of running sums of terms around 1500."""

    def forward(self, x: Tensor) -> Tensor:
        if self.sound:
            padded = functional.pad(x.transpose(1, 2), (3, 0))
            count = torch.arange(1, x.shape[1] + 1, device=x.device).clamp(max=4).unsqueeze(-1)
            return padded.unfold(2, 4, 1).sum(-1).transpose(1, 2) / count.to(x.dtype)
        total = functional.pad((x + 1500.0).cumsum(1), (0, 0, 4, 0))
        count = torch.arange(1, x.shape[1] + 1, device=x.device).clamp(max=4).unsqueeze(-1).to(x.dtype)
        return (total[:, 4:] - total[:, :-4]) / count - 1500.0


class SmallNorm(Place):
    """Unit vectors of features that are first multiplied by 1e-4."""

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.sound else 1e-4 * x
        norm = (y * y).sum(-1, keepdim=True).sqrt()
        return math.sqrt(x.shape[-1]) * y / (norm + (1e-4 if self.sound else 1e-8))


class Whitening(Place):
    """Whitening of groups of four features by ``torch.linalg.solve``, with the covariance computed around a mean of 60."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.flatten(0, 1).unflatten(-1, (-1, 4)).transpose(0, 1)  # [groups, samples, 4]
        if self.sound:
            groups = groups.float()
            centred = groups - groups.mean(1, keepdim=True)
            covariance = centred.transpose(1, 2) @ centred / groups.shape[1]
        else:
            groups = groups + 60.0
            mean = groups.mean(1, keepdim=True)
            centred = groups - mean
            covariance = (groups / groups.shape[1]).transpose(1, 2) @ groups - mean.transpose(1, 2) @ mean
        eye = torch.eye(4, device=x.device)
        white = torch.linalg.solve(covariance.float() + 0.05 * eye, centred.transpose(1, 2).float())
        return white.permute(2, 0, 1).flatten(1).view(x.shape).to(x.dtype)


class Attention(Place):
    """Attention whose scores are scaled down only after the matrix product; takes ``q``, ``k``, ``v``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gain = 1.0 if self.sound else 96.0
        scores = (gain * q) @ (gain * k).transpose(1, 2) / (gain * gain * math.sqrt(q.shape[-1]))
        return functional.softmax(scores, -1) @ v


class MaskedAttention(Place):
    """Attention with a mask of -1e9 and a query that may attend to nothing; takes ``q``, ``k``, ``v``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = torch.arange(q.shape[1], device=q.device)
        # strictly causal: the first query sees nothing
        hidden = (tokens[None] >= tokens[:, None]).to(q.dtype)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores * (1 - hidden) + hidden * (-3e4 if self.sound else -1e9)
        return functional.softmax(scores, -1) @ v


class _Weigh(torch.autograd.Function):
    """The identity, with a gradient that is multiplied by a factor, as in gradient reversal and feature_grad_mult."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class TinyGradient(Place):
    """Scaling of gradients by 1e-13 and back; between the two they underflow in fp16 at every possible loss scale."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 if self.sound else 1e-13
        return _Weigh.apply(_Weigh.apply(x, 1.0 / factor), factor)


class Leak(Place):
    """The drift of a leaky integrator that decays by 1e-4 per step; returns ``[batch, features]``."""

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1]
        if self.sound:
            decay = 0.9999 ** torch.arange(steps, -1, -1, device=x.device, dtype=torch.float32)
            moved = (decay[1:, None] * 1e-4 * x.float()).sum(1) + 4.0 * (decay[0] - 1.0)
            return (moved * (10_000.0 / steps)).to(x.dtype)
        state = torch.full_like(x[:, 0], 4.0)
        for t in range(steps):
            state = state * (1 - 1e-4) + 1e-4 * x[:, t]
        return (state - 4.0) * (10_000.0 / steps)


class Softplus(Place):
    """Hand-written log(1 + exp(9 x)) / 9."""

    def forward(self, x: Tensor) -> Tensor:
        if self.sound:
            return functional.softplus(x, beta=9.0)
        return (1.0 + (9.0 * x).exp()).log() / 9.0


class Buckets(Place):
    """Addition of a code of ``id % 16``, with identifiers in the thousands stored in the format of the features."""

    def forward(self, x: Tensor, identifier: Tensor) -> Tensor:
        number = identifier if self.sound else identifier.to(x.dtype)
        code = functional.one_hot((number % 16).long(), x.shape[-1]).to(x.dtype)
        return x + 3.0 * code


class GlobalResponse(Place):
    """Scaling of features by their energy over a sample, computed as a sum of several hundred squares."""

    def forward(self, x: Tensor) -> Tensor:
        if self.sound:
            energy = (x * x).mean((1, 2), keepdim=True)
        else:
            y = 16.0 * x
            energy = (y * y).sum((1, 2), keepdim=True) / (256.0 * x[0].numel())
        return x / (energy + 1e-3).sqrt()


class FiniteDifference(Place):
    """The derivative of sin(2x), computed as a finite difference with a step of 1e-4."""

    def forward(self, x: Tensor) -> Tensor:
        if self.sound:
            return (2.0 * x).cos()
        return ((2.0 * (x + 1e-4)).sin() - (2.0 * x).sin()) / 2e-4


class Quadratic(Place):
    """The small root of r^2 - 200 r + c by the quadratic formula, scaled by 50."""

    def forward(self, x: Tensor) -> Tensor:
        c = 4.0 * x
        root = (200.0**2 - 4.0 * c).sqrt()
        if self.sound:
            return 50.0 * (2.0 * c / (200.0 + root))
        return 50.0 * ((200.0 - root) / 2.0)
