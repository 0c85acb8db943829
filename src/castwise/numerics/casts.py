"""What a format would do to values: how many overflow, become subnormal or vanish, and how large the error is.

Values are cast and cast back, so no hardware is needed that computes in the format. Of large tensors a sample is cast;
whether anything overflows is asked of all of it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from castwise.plans.formats import FORMATS, Format

SAMPLE = 1 << 15
"""Of a larger tensor so many values are cast, drawn at random: a share is off by 0.3 percentage points at most (one sigma)."""
ENDLESS = (2.0 - 2.0**-8) * 2.0**127
"""Values from here on stand for infinity in fp32 already, as the smallest number does in a mask: bf16 would round them to it."""


@dataclass(frozen=True)
class Cast:
    """What a format makes of some values.

    Attributes:
        format: Its name.
        scale: What values are multiplied by before they are cast: the loss scale of gradients in fp16, ``"tensor"`` for a scale
            of each tensor's own that takes its largest value to the format's largest; None where they are cast as they are.
        overflow: Share of finite values, zeros among them, that are too large for it: infinite after the cast, or saturated
            where the format has no infinity.
        subnormal: Share that has fewer digits than the format's normal numbers.
        flush: Share that becomes zero and was not.
        error: Root of the square of what rounding changes over the square of the values, of those that do not overflow; 0 where
            there are none.
    """

    format: str
    scale: float | str | None
    overflow: float
    subnormal: float
    flush: float
    error: float

    @property
    def underflow(self) -> float:
        """Share of the squared values that is lost beyond what the format's digits explain."""
        return max(0.0, self.error**2 - FORMATS[self.format].eps ** 2 / 12.0)


@dataclass(frozen=True)
class Tally:
    """Sums over values that :class:`Cast` is made of; tallies add up."""

    count: float = 0.0
    overflow: float = 0.0
    subnormal: float = 0.0
    flush: float = 0.0
    error: float = 0.0
    square: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(mine + others for mine, others in zip(_parts(self), _parts(other), strict=True)))

    def cast(self, format: str, scale: float | str | None) -> Cast:
        """The shares."""
        shares = (value / self.count if self.count else 0.0 for value in _parts(self)[1:4])
        return Cast(format, scale, *shares, math.sqrt(self.error / self.square) if self.square else 0.0)


def _parts(tally: Tally) -> tuple[float, ...]:
    return (tally.count, tally.overflow, tally.subnormal, tally.flush, tally.error, tally.square)


def finite_values(tensor: Tensor) -> Tensor:
    """The values of a floating or complex tensor that are finite, flat and in fp32, or in fp64 where it is that."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).detach().reshape(-1)
    wide = flat if flat.dtype is torch.float64 else flat.float()
    held = wide.abs() < ENDLESS
    return wide if bool(held.all()) else wide[held]


def tally(values: Tensor, format: Format, scale: float = 1.0) -> Tally:
    """Cast values to a format. Waits for the device.

    Args:
        values: Of :func:`finite_values`.
        format: To cast to.
        scale: What they are multiplied by before.
    """
    count = values.numel()
    if not count:
        return Tally()
    some = sampled(values) * scale
    low = _cast(some, format)
    over = _overflows(some, low, format)
    magnitude = torch.where(over, 1.0, low.abs())
    shares = torch.stack([(magnitude > 0) & (magnitude < format.smallest_normal), (magnitude == 0) & (some != 0)])
    squares = torch.stack([torch.where(over, 0.0, low - some), torch.where(over, 0.0, some)])
    subnormal, flush = (shares.sum(1) * (count / some.numel())).tolist()
    error, square = (squares.double().square().sum(1) * (count / some.numel() / scale**2)).tolist()
    return Tally(float(count), _overflowing(values, format, scale), subnormal, flush, error, square)


def tensor_scale(values: Tensor, format: Format) -> float:
    """The factor that takes the largest value to the format's largest, as torchao's tensorwise recipe has it.

    Source: torchao.float8, ``amax_to_scale``, which takes a largest value below 1e-12 for that.
    """
    return format.max / max(float(values.abs().max()) if values.numel() else 0.0, 1e-12)


def sampled(values: Tensor) -> Tensor:
    """At most ``SAMPLE`` of some values, the same places for every tensor of a size; random numbers stay as they are."""
    return values if values.numel() <= SAMPLE else values[_places(values.numel()).to(values.device)]


@functools.lru_cache(maxsize=16)
def _places(count: int) -> Tensor:
    return torch.from_numpy(np.sort(np.random.default_rng(count).integers(count, size=SAMPLE)))


def _edge(format: Format) -> float:
    """Halfway from the largest value to what would follow it: what is larger overflows, also where a cast saturates."""
    return format.max + 2.0 ** math.floor(math.log2(format.max)) * format.eps / 2.0


def _overflows(values: Tensor, low: Tensor, format: Format) -> Tensor:
    return (values.abs() > _edge(format)) | ~torch.isfinite(low)


def _overflowing(values: Tensor, format: Format, scale: float) -> float:
    """How many of all values overflow: what is rare a sample would miss."""
    large = values[values.abs() * scale > format.max] * scale
    return float(_overflows(large, _cast(large, format), format).sum())


def _cast(values: Tensor, format: Format) -> Tensor:
    return values.to(format.dtype).to(values.dtype)
