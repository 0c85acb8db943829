"""Models with one numerically fragile place, and the same models with a sound version of that place.

Every model has the same frame: an input Linear, blocks of Linear, LayerNorm and GELU around the place, and an output
Linear. So a plan that exempts everything is noticed. The place is a module at the path ``place``. Its input comes
from a layer that computes in the low format, and keeping only this module in fp32 cures the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise import Workload

WIDTH = 32
TOKENS = 32
CLASSES = 8


class Frame(nn.Module):
    """A frame around the place; maps ``[batch, tokens, features]`` to logits ``[batch, classes]``."""

    def __init__(self, place: nn.Module) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        self.place = place
        self.after = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        self.answer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[batch, classes]``."""
        x = self.place(self.before(self.inward(x)))
        return self.answer(self.after(x).mean(1))


# --- fragile places and their sound twins: each maps [batch, tokens, WIDTH] to the same shape ------------------


class Variance(nn.Module):
    """Standardization with the variance computed as E[x^2] - E[x]^2, around a mean of 400."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.sound = sound

    def forward(self, x: Tensor) -> Tensor:
        """Standardize over features."""
        if self.sound:
            return functional.layer_norm(x, (WIDTH,))
        y = x + 400.0
        mean = y.mean(-1, keepdim=True)
        variance = (y * y).mean(-1, keepdim=True) - mean * mean
        return (y - mean) / (variance.clamp_min(0) + 1e-3).sqrt()


class LogSumExp(nn.Module):
    """Hand-written log-softmax of values up to a few dozen, without subtracting the maximum first."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.sound = sound

    def forward(self, x: Tensor) -> Tensor:
        """Return the log-softmax over features, scaled."""
        if self.sound:
            return 0.1 * functional.log_softmax(2.0 * x.float(), -1).to(x.dtype)
        y = 2.0 * x + 12.0
        return 0.1 * (y - y.exp().sum(-1, keepdim=True).log())


class Softmax(nn.Module):
    """Hand-written softmax over logits with a common offset of 8000, whose differences a low format cannot resolve."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.sound = sound

    def forward(self, x: Tensor) -> Tensor:
        """Return the weights over features, scaled to the size of the features."""
        y = x if self.sound else x + 8000.0
        weights = (y - y.amax(-1, keepdim=True)).exp()
        return WIDTH * weights / weights.sum(-1, keepdim=True) - 1.0


class Epsilon(nn.Module):
    """Division by a root mean square that is sometimes zero, with an epsilon that is zero in fp16."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.eps = 1e-3 if sound else 1e-8

    def forward(self, x: Tensor) -> Tensor:
        """RMS-normalize, with every eighth token set to zero."""
        keep = torch.arange(x.shape[1], device=x.device) % 8 != 0
        y = x * keep[:, None]
        return y / ((y * y).mean(-1, keepdim=True) + self.eps).sqrt()


class SquaredError(nn.Module):
    """A gate computed from the mean square of values around 300."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.scale = 1.0 if sound else 300.0

    def forward(self, x: Tensor) -> Tensor:
        """Gate features by their mean squared distance from a reference."""
        y = self.scale * (x + 1.0)
        distance = (y * y).mean(-1, keepdim=True) / self.scale**2
        return x * torch.sigmoid(1.0 - distance)


class Cumulative(nn.Module):
    """A running mean over tokens, computed from a running sum of terms around 400."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.sound = sound

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over all tokens up to each token."""
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        if self.sound:
            return 4.0 * (x.float().cumsum(1) / count).to(x.dtype)
        total = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            total = total + (x[:, t] + 400.0)
            out.append(total - 400.0 * (t + 1))
        return 4.0 * torch.stack(out, 1) / count


class SmallNorm(nn.Module):
    """The difference of two large, nearly equal vectors, divided by its norm."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.offset = 0.0 if sound else 8000.0

    def forward(self, x: Tensor) -> Tensor:
        """Return unit vectors, scaled by sqrt(features)."""
        difference = (0.5 * x + self.offset) - self.offset
        norm = (difference * difference).sum(-1, keepdim=True).add(1e-4).sqrt()
        return math.sqrt(WIDTH) * difference / norm


class Solve(nn.Module):
    """A solver of nearly singular 2 x 2 systems by Cramer's rule, with the determinant computed as 1 - c^2."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.near = 0.5 if sound else 0.002

    def forward(self, x: Tensor) -> Tensor:
        """Solve [[1, c], [c, 1]] for pairs of features, scaled."""
        a, b = x.chunk(2, -1)
        c = 1.0 - self.near * torch.sigmoid(a)
        determinant = 1.0 - c * c
        return (
            self.near
            * torch.cat((a - c * b, b - c * a), -1)
            / (determinant + 0.01 * self.near).repeat(1, 1, 2)
        )


class Positions(nn.Module):
    """A rotation by positions and its inverse, with the inverse's angles computed in the format of the features."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.sound = sound

    def _angles(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        position = torch.arange(1000, 1000 + like.shape[1], device=like.device, dtype=dtype)[:, None]
        return position * torch.linspace(1.0, 0.1, WIDTH // 2, device=like.device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate pairs of features by their positions and back."""
        exact = self._angles(x, torch.float32)
        again = exact if self.sound else self._angles(x, x.dtype)
        a, b = x.chunk(2, -1)
        cosine, sine = exact.cos().to(x.dtype), exact.sin().to(x.dtype)
        a, b = a * cosine - b * sine, a * sine + b * cosine
        cosine, sine = again.cos().to(x.dtype), again.sin().to(x.dtype)
        return torch.cat((a * cosine + b * sine, b * cosine - a * sine), -1)


class Overflow(nn.Module):
    """Attention whose logits grow past 65,504 before they are scaled down."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.scale = 1.0 if sound else 80.0

    def forward(self, x: Tensor) -> Tensor:
        """Attend over tokens."""
        y = self.scale * x
        logits = (y @ y.transpose(1, 2)) / self.scale**2 / math.sqrt(WIDTH)
        return torch.softmax(logits.float(), -1).to(x.dtype) @ x


class Underflow(nn.Module):
    """Squares of small numbers, which underflow in fp16, multiplied by a large factor."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.small = 1.0 if sound else 1e-4

    def forward(self, x: Tensor) -> Tensor:
        """Return signed squares of features."""
        y = self.small * x
        return (y * y.abs()) / self.small**2 * 0.5


class Recurrence(nn.Module):
    """A running sum that starts at 512, whose small steps are lost to rounding."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.sound = sound

    def forward(self, x: Tensor) -> Tensor:
        """Return the state after each token."""
        state = torch.zeros_like(x[:, 0]) if self.sound else torch.full_like(x[:, 0], 512.0)
        out = []
        for t in range(x.shape[1]):
            state = state + 0.05 * x[:, t]
            out.append(state if self.sound else state - 512.0)
        return 2.0 * torch.stack(out, 1)


class Counting(nn.Module):
    """An alternating sign that is undone by a sign computed from large positions, in the format of the features."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.start = 0.0 if sound else 4000.0

    def forward(self, x: Tensor) -> Tensor:
        """Change the sign of every other token and change it back."""
        at = torch.arange(x.shape[1], device=x.device)
        position = at.to(x.dtype) + self.start
        sign = torch.cos(math.pi * (position - self.start))
        return x * (1 - 2 * (at % 2))[:, None] * sign[:, None]


class Exponential(nn.Module):
    """exp(x + 10.5) times exp(-10.5): two factors that cancel, of which the first overflows fp16."""

    def __init__(self, sound: bool) -> None:
        super().__init__()
        self.shift = 0.0 if sound else 10.5

    def forward(self, x: Tensor) -> Tensor:
        """Return the exponential of the features, scaled."""
        y = 0.7 * x
        return 0.3 * (y + self.shift).exp() * math.exp(-self.shift)


# --- cases ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A case with a fragile place.

    Attributes:
        name: Name of the case.
        formats: The formats among bf16 and fp16 in which training fails because of the place.
        place: Builds the module, sound or not.
    """

    name: str
    formats: tuple[str, ...]
    place: Callable[[bool], nn.Module]

    @property
    def fragile(self) -> str:
        """Return the path of the place."""
        return "place"

    def workload(self, sound: bool) -> Workload:
        """Return the workload with the fragile place, or its sound twin."""
        return Workload(
            name=f"{self.name}-{'sound' if sound else 'fragile'}",
            model=partial(_model, self.place, sound),
            optimizer=_optimizer,
            batches=_batches,
            loss=_loss,
        )

    def units(self) -> list[str]:
        """Return the paths of all modules except containers, which a plan could exempt."""
        model = Frame(self.place(False))
        return [name for name, m in model.named_modules() if name and not isinstance(m, nn.Sequential)]


def _model(place: Callable[[bool], nn.Module], sound: bool) -> nn.Module:
    return Frame(place(sound))


def _optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=3e-3)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, label = batch
    return functional.cross_entropy(model(x), label)


def _batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield noisy tokens around a prototype of their class, ``[16, tokens, WIDTH]``, and labels ``[16]``."""
    prototypes = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    while True:
        label = torch.randint(CLASSES, (16,), generator=generator)
        noise = torch.randn(16, TOKENS, WIDTH, generator=generator)
        yield 0.35 * prototypes[label][:, None] + noise, label


CASES = (
    Case("variance", ("bf16", "fp16"), Variance),
    Case("log-sum-exp", ("fp16",), LogSumExp),
    Case("softmax", ("bf16", "fp16"), Softmax),
    Case("epsilon", ("fp16",), Epsilon),
    Case("squared-error", ("fp16",), SquaredError),
    Case("cumulative", ("bf16", "fp16"), Cumulative),
    Case("small-norm", ("bf16", "fp16"), SmallNorm),
    Case("solve", ("bf16",), Solve),
    Case("positions", ("bf16",), Positions),
    Case("overflow", ("fp16",), Overflow),
    Case("underflow", ("fp16",), Underflow),
    Case("recurrence", ("bf16", "fp16"), Recurrence),
    Case("counting", ("bf16", "fp16"), Counting),
    Case("exponential", ("fp16",), Exponential),
)
