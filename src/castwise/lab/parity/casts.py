"""What a format would do to values: how many overflow, become subnormal or vanish, and how large the error is.

Values are cast and cast back, so no hardware is needed that computes in the format. Of large tensors a sample is cast;
whether anything overflows is asked of all of it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from castwise.core.plans.formats import FORMATS, Format
from castwise.lab.parity.gradient_range import Magnitudes

SAMPLE = 1 << 15
"""This many values of a larger tensor are cast, drawn at random: a share is off by at most 0.3 percentage points (one sigma)."""
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
        underflow: Share of the squared values that is lost beyond what the format's digits explain; of several tensors that of
            the one that loses most.
    """

    format: str
    scale: float | str | None
    overflow: float
    subnormal: float
    flush: float
    error: float
    underflow: float


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
        return Tally(*map(operator.add, astuple(self), astuple(other)))

    def underflow(self, format: str) -> float:
        """Share of the squared values that is lost beyond what a format's digits explain."""
        return max(0.0, self.error / self.square - FORMATS[format].eps ** 2 / 12.0) if self.square else 0.0


def cast_of(tallies: Sequence[Tally], format: str, scale: float | str | None, least: float = 0.0) -> Cast:
    """What a format makes of several tensors together.

    Args:
        tallies: One for each.
        format: That they were cast to.
        scale: With which.
        least: Tensors whose square is smaller do not count for ``underflow``.
    """
    all_ = functools.reduce(operator.add, tallies, Tally())
    count = all_.count or 1.0
    error = math.sqrt(all_.error / all_.square) if all_.square else 0.0
    underflow = max((one.underflow(format) for one in tallies if one.square >= least), default=0.0)
    return Cast(
        format, scale, all_.overflow / count, all_.subnormal / count, all_.flush / count, error, underflow
    )


@dataclass(frozen=True)
class Values:
    """The finite values of a tensor, in fp32, or in fp64 where it is that.

    Attributes:
        every: Flat; of complex ones the real and the imaginary parts.
        some: Of many a sample: the same places for every tensor of a size, and random numbers stay as they are.
        largest: Magnitude of all.
    """

    every: Tensor
    some: Tensor
    largest: float

    @classmethod
    def of(cls, tensor: Tensor) -> Values:
        """Those of a floating or complex tensor. Waits for the device."""
        flat = (
            (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)
            .detach()
            .reshape(-1)
        )
        wide = flat if flat.dtype is torch.float64 else flat.float()
        largest = float(wide.abs().max()) if wide.numel() else 0.0
        if not largest < ENDLESS:
            wide = wide[wide.abs() < ENDLESS]
            largest = float(wide.abs().max()) if wide.numel() else 0.0
        many = wide.numel() > SAMPLE
        return cls(wide, wide[_places(wide.numel()).to(wide.device)] if many else wide, largest)

    @property
    def count(self) -> int:
        """How many there are."""
        return self.every.numel()

    @property
    def times(self) -> float:
        """How many a value of the sample stands for."""
        return self.count / max(1, self.some.numel())

    def own_scale(self, format: Format) -> float:
        """The factor that takes the largest value to the format's largest, as torchao's tensorwise recipe has it.

        Source: torchao.float8, ``amax_to_scale``, which takes a largest value below 1e-12 for that.
        """
        return format.max / max(self.largest, 1e-12)

    def count_into(self, magnitudes: Magnitudes) -> None:
        """Count the sample's magnitudes, for all; the largest is that of all."""
        magnitudes.add(self.some, round(self.times))
        magnitudes.largest = max(magnitudes.largest, self.largest)

    def tally(self, format: Format, scale: float = 1.0) -> Tally:
        """Cast the values, multiplied by a scale, to a format. Waits for the device."""
        if not self.count:
            return Tally()
        some = self.some * scale
        low = _cast(some, format)
        over = _overflows(some, low, format)
        magnitude = torch.where(over, 1.0, low.abs())
        shares = torch.stack([
            (magnitude > 0) & (magnitude < format.smallest_normal),
            (magnitude == 0) & (some != 0),
        ])
        squares = torch.stack([torch.where(over, 0.0, low - some), torch.where(over, 0.0, some)])
        subnormal, flush = (shares.sum(1) * self.times).tolist()
        error, square = (squares.double().square().sum(1) * (self.times / scale**2)).tolist()
        return Tally(float(self.count), self._overflowing(format, scale), subnormal, flush, error, square)

    def _overflowing(self, format: Format, scale: float) -> float:
        """How many of all values overflow: what is rare a sample would miss."""
        if self.largest * scale <= format.max:
            return 0.0
        large = self.every[self.every.abs() * scale >= format.max] * scale
        return float(_overflows(large, _cast(large, format), format).sum())


@functools.lru_cache(maxsize=16)
def _places(count: int) -> Tensor:
    return torch.from_numpy(np.sort(np.random.default_rng(count).integers(count, size=SAMPLE)))


def _edge(format: Format) -> float:
    """Halfway from the largest value to what would follow it: what is larger overflows, also where a cast saturates."""
    return format.max + 2.0 ** math.floor(math.log2(format.max)) * format.eps / 2.0


def _overflows(values: Tensor, low: Tensor, format: Format) -> Tensor:
    return (values.abs() > _edge(format)) | ~torch.isfinite(low)


def _cast(values: Tensor, format: Format) -> Tensor:
    return values.to(format.dtype).to(values.dtype)
