"""Measure the effect of casting values to a format: the shares that overflow, become subnormal or vanish, and the error.

Values are cast and cast back, so no hardware that computes in the format is needed. Of large tensors only a sample is cast, but
all elements are checked for overflow.
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

from castwise.core.devices import in_fp64
from castwise.core.plans.formats import FORMATS, Format
from castwise.lab.parity.gradient_range import Magnitudes

SAMPLE = 1 << 15
"""Number of elements that are drawn at random from a larger tensor: a share is off by at most 0.3 percentage points (one sigma)."""
ENDLESS = (2.0 - 2.0**-8) * 2.0**127
"""Values of at least this magnitude, such as a mask's most negative number, count as infinite: bf16 rounds them to infinity."""


@dataclass(frozen=True)
class Cast:
    """The effect of casting some values to a format.

    Attributes:
        format: The name of the format.
        scale: The factor by which values are multiplied before the cast. For gradients in fp16 it is the loss scale.
            ``"tensor"`` stands for a scale for each tensor, which maps the tensor's largest value to the format's
            largest value. None for an unscaled cast.
        overflow: The share of finite values, zeros included, that are too large for the format. They become infinite,
            or the format's largest value if the format has no infinity.
        subnormal: The share of values that become subnormal, with fewer digits than the format's normal numbers.
        flush: The share of all values that are nonzero and become zero.
        error: The relative rounding error: the root of the sum of squared errors, divided by the root of the sum of
            squared values. Values that overflow are left out. It is 0 if no values remain.
        underflow: The share of the values' sum of squares that is lost beyond normal rounding to the format's digits.
            If several tensors were cast, it is the largest share of any tensor.
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
    """Sums over cast values, from which a :class:`Cast` is computed; the sums of several tensors can be added."""

    count: float = 0.0
    overflow: float = 0.0
    subnormal: float = 0.0
    flush: float = 0.0
    error: float = 0.0
    square: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*map(operator.add, astuple(self), astuple(other)))

    def underflow(self, format: str) -> float:
        """Return the share of the values' sum of squares that is lost beyond normal rounding to a format's digits."""
        return max(0.0, self.error / self.square - FORMATS[format].eps ** 2 / 12.0) if self.square else 0.0


def cast_of(tallies: Sequence[Tally], format: str, scale: float | str | None, least: float = 0.0) -> Cast:
    """Return the effect of casting several tensors together to a format.

    Args:
        tallies: The sums of each tensor.
        format: The format of the casts.
        scale: The scale of the casts.
        least: Tensors with a smaller sum of squares than this do not count for ``underflow``.
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
    """The finite values of a tensor, in fp32, or in fp64 if the tensor is fp64.

    Attributes:
        every: All values, flat; complex values as real and imaginary parts.
        some: A random sample if there are many values, otherwise all. Tensors of equal size are sampled at the same positions, and
            the global random generators are not used.
        largest: Largest magnitude of all values.
    """

    every: Tensor
    some: Tensor
    largest: float

    @classmethod
    def of(cls, tensor: Tensor) -> Values:
        """Return the finite values of a floating or complex tensor; waits for the device."""
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
        """The number of values."""
        return self.every.numel()

    @property
    def times(self) -> float:
        """The number of values that one value of the sample represents."""
        return self.count / max(1, self.some.numel())

    def own_scale(self, format: Format) -> float:
        """Return the factor that maps the largest value to the format's largest, as in torchao's tensorwise recipe.

        Source: torchao.float8, ``amax_to_scale``, which treats a largest value below 1e-12 as 1e-12.
        """
        return format.max / max(self.largest, 1e-12)

    def count_into(self, magnitudes: Magnitudes) -> None:
        """Count the values by magnitude in ``magnitudes``; the sample stands for all values, but the largest magnitude is exact."""
        magnitudes.add(self.some, round(self.times))
        magnitudes.largest = max(magnitudes.largest, self.largest)

    def tally(self, format: Format, scale: float = 1.0) -> Tally:
        """Cast the scaled values to a format, and return the sums of what overflows, underflows and is lost; waits for the device."""
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
        error, square = (in_fp64(squares).square().sum(1) * (self.times / scale**2)).tolist()
        return Tally(float(self.count), self._overflowing(format, scale), subnormal, flush, error, square)

    def _overflowing(self, format: Format, scale: float) -> float:
        """Return how many of all values overflow; a sample would miss rare overflows."""
        if self.largest * scale <= format.max:
            return 0.0
        large = self.every[self.every.abs() * scale >= format.max] * scale
        return float(_overflows(large, _cast(large, format), format).sum())


@functools.lru_cache(maxsize=16)
def _places(count: int) -> Tensor:
    return torch.from_numpy(np.sort(np.random.default_rng(count).integers(count, size=SAMPLE)))


def _edge(format: Format) -> float:
    """Return the magnitude above which a value overflows.

    This limit lies halfway between the format's largest value and the number that would come next. It is used for formats whose
    cast saturates, too.
    """
    return format.max + 2.0 ** math.floor(math.log2(format.max)) * format.eps / 2.0


def _overflows(values: Tensor, low: Tensor, format: Format) -> Tensor:
    return (values.abs() > _edge(format)) | ~torch.isfinite(low)


def _cast(values: Tensor, format: Format) -> Tensor:
    return values.to(format.dtype).to(values.dtype)
