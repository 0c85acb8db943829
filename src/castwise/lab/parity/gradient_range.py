"""Observe the magnitudes of gradients, and find the loss scales at which they neither overflow nor underflow in fp16.

In an fp16 backward pass, small gradients of activations underflow. Large ones overflow, and so do weight gradients, which are
summed over the batch before they are cast to fp32. The gradients of each module are observed in an fp32 pass. The range of
possible loss scales follows from their magnitudes, and training can start with a loss scale inside this range.

Source: the method of Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, with a measured factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from castwise.core.casting.trees import tensors_in
from castwise.core.plans.formats import FORMATS
from castwise.lab.passes.observers import Call, Observer

LOWEST = -149
"""Exponent of fp32's smallest subnormal number."""
BINS = 277
"""Number of bins up to fp32's largest exponent; larger or smaller fp64 values are counted in the outermost bins."""
LOST = 1e-4
"""Share of a module's squared gradient that may be lost to underflow."""
HEADROOM = 8.0
"""Factor by which the initial loss scale is below overflow: other batches and later steps have larger gradients."""
NEGLIGIBLE = 1e-10
"""Modules with less than this share of the largest module's squared gradient do not narrow the range of scales."""


@dataclass(frozen=True)
class Histogram:
    """A count of the magnitudes of a module's gradients, or of other values, by powers of two.

    Attributes:
        pattern: The path of the module, or the pattern that names the module in a plan.
        lowest: The exponent of the first bin. Bin i counts values with 2**(lowest+i) <= magnitude < 2**(lowest+i+1).
        counts: The number of values in each bin.
        zeros: The number of values that are exactly zero.
    """

    pattern: str
    lowest: int
    counts: tuple[int, ...]
    zeros: int

    def smallest(self, share: float = LOST) -> float:
        """Return the power of two below which the values make up at most ``share`` of the squared norm.

        It is 0 if all values are zero.
        """
        rest = share * self.energy
        for i, energy in enumerate(self._energies):
            if energy > rest:
                return 2.0 ** (self.lowest + i)
            rest -= energy
        return 0.0

    @property
    def energy(self) -> float:
        """The sum of the squared values, computed approximately from the counts."""
        return math.fsum(self._energies)

    @property
    def _energies(self) -> list[float]:
        return [count * 4.0 ** (self.lowest + i + 0.5) for i, count in enumerate(self.counts)]


@dataclass(frozen=True)
class ScaleRange:
    """The range of loss scales at which fp16 can represent the gradients.

    Attributes:
        largest: The largest magnitude of any gradient of a module's output or of a parameter, without a loss scale.
        smallest: The smallest magnitude that must not underflow. All gradients below it make up one part in 10,000 of
            a module's squared gradient.
        lowest_scale: The loss scale below which ``smallest`` underflows.
        highest_scale: The loss scale above which ``largest`` overflows.
        init: A good initial loss scale. It is a power of two, at least a factor of eight below overflow.
    """

    largest: float
    smallest: float
    lowest_scale: float
    highest_scale: float
    init: float

    @property
    def is_empty(self) -> bool:
        """Whether no loss scale keeps both the smallest and the largest gradient in the range of fp16."""
        return self.lowest_scale > self.highest_scale


class Magnitudes:
    """Counts values by the powers of two between which their magnitudes lie; waits for the device with each tensor.

    Attributes:
        zeros: Number of values that are exactly zero.
        largest: Largest magnitude; infinite if a value is infinite.
    """

    def __init__(self) -> None:
        self._counts = torch.zeros(BINS, dtype=torch.long, device="cpu")
        self.zeros = 0
        self.largest = 0.0

    def add(self, tensor: Tensor, times: int = 1) -> None:
        """Count the values of a floating tensor, each ``times`` times; non-finite values affect only ``largest``."""
        magnitude = tensor.detach().abs().reshape(-1)
        magnitude = magnitude if magnitude.dtype is torch.float64 else magnitude.float()
        if not magnitude.numel():
            return
        some = magnitude[(magnitude > 0) & torch.isfinite(magnitude)]
        bins = (torch.frexp(some)[1].long() - 1 - LOWEST).clamp(0, BINS - 1)
        self._counts += times * torch.bincount(bins, minlength=BINS).cpu()
        self.zeros += times * int((magnitude == 0).sum())
        self.largest = max(self.largest, float(magnitude.max()))

    def __iadd__(self, other: Magnitudes) -> Self:
        self._counts = self._counts + other._counts
        self.zeros += other.zeros
        self.largest = max(self.largest, other.largest)
        return self

    def histogram(self, pattern: str) -> Histogram:
        """Return the histogram of the counts, without empty bins at both ends."""
        used = self._counts.nonzero().flatten().tolist()
        if not used:
            return Histogram(pattern, 0, (), self.zeros)
        return Histogram(
            pattern, LOWEST + used[0], tuple(self._counts[used[0] : used[-1] + 1].tolist()), self.zeros
        )


class GradientRange(Observer):
    """Observes the magnitudes of the gradients of module outputs and of parameters.

    Attributes:
        largest_parameter: The largest magnitude in each parameter's gradient, by the parameter's name.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Magnitudes] = {}
        self.largest_parameter: dict[str, float] = {}

    @property
    def largest(self) -> dict[str, float]:
        """The largest magnitude in the gradients of each module's outputs, by module path."""
        return {path: seen.largest for path, seen in self._seen.items()}

    def see_parameters(self, names: Iterable[str], gradients: Iterable[Tensor]) -> None:
        """Include the gradients of parameters, which must not be multiplied by a loss scale."""
        for name, gradient in zip(names, gradients, strict=True):
            if gradient.numel():
                value = float(gradient.abs().max())
                self.largest_parameter[name] = max(self.largest_parameter.get(name, 0.0), value)

    def modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Return all modules of the model, with their paths."""
        yield from model.named_modules()

    def leave(self, call: Call, output: Any) -> None:
        """Register hooks that observe the gradients of a module's output."""
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(lambda gradient: self._see(call.path, gradient))

    def _see(self, path: str, gradient: Tensor | None) -> None:
        # the gradient is None for an unused output of an operator of which another output is used
        if gradient is not None and gradient.numel():
            self._seen.setdefault(path, Magnitudes()).add(gradient)

    def histogram(self, pattern: str, paths: Iterable[str]) -> Histogram | None:
        """Return one histogram of the output gradients of the modules at some paths, without empty bins at both ends.

        None is returned if no gradient passed through any of these modules.
        """
        seen = [self._seen[path] for path in paths if path in self._seen]
        return sum_of(seen).histogram(pattern) if seen else None

    def scales(self) -> ScaleRange | None:
        """Return the loss scales at which no module's gradients overflow or underflow in fp16; None if no gradient was seen."""
        finite = [path for path, value in self.largest.items() if 0.0 < value < math.inf]
        histograms = [h for path in finite if (h := self.histogram(path, [path])) is not None]
        largest = [*(self.largest[path] for path in finite), *self.largest_parameter.values()]
        return scale_range(histograms, max(largest, default=0.0))


def sum_of(parts: Iterable[Magnitudes]) -> Magnitudes:
    """Return the sum of several counts of magnitudes."""
    total = Magnitudes()
    for part in parts:
        total += part
    return total


def scale_range(histograms: Sequence[Histogram], largest: float) -> ScaleRange | None:
    """Return the loss scales at which gradients neither overflow nor underflow in fp16, or None if there are no gradients.

    Args:
        histograms: Histograms of regions; regions with negligible gradients do not narrow the range.
        largest: Largest magnitude of any gradient.
    """
    most = max((h.energy for h in histograms), default=0.0)
    if not most:
        return None
    smallest = min(h.smallest() for h in histograms if h.energy >= NEGLIGIBLE * most)
    fp16 = FORMATS["fp16"]
    highest = fp16.max / largest
    lowest = fp16.smallest_subnormal / smallest
    init = 2.0 ** math.floor(math.log2(highest / HEADROOM))
    return ScaleRange(largest, smallest, lowest, highest, min(max(init, 2.0**-14), 2.0**24))
