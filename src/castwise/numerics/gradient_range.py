"""Magnitudes of gradients, and the loss scales under which fp16 holds them.

What underflows in an fp16 backward pass are the gradients of activations; what overflows are these, and those of weights,
which sum over the batch before they are cast to fp32. Both are observed in an fp32 pass, module by module; the range of
scales follows from them and training can start inside it.

Source: the method of Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, with the factor measured.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from castwise.casting.trees import tensors_in
from castwise.plans.formats import FORMATS

LOWEST = -80
BINS = 144
LOST = 1e-4
"""Share of a module's squared gradient that underflow may take."""
HEADROOM = 8.0
"""The scale starts this far below overflow: other batches and later steps have larger gradients."""
NEGLIGIBLE = 1e-10
"""Modules whose squared gradient is below this share of the largest module's do not narrow the range of scales."""


@dataclass(frozen=True)
class Histogram:
    """Magnitudes of a region's gradients in fp32.

    Attributes:
        lowest: Exponent of the first bin: bin i counts gradients with 2**(lowest+i) <= magnitude < 2**(lowest+i+1).
        counts: Per bin.
        zeros: Gradients that are exactly zero.
    """

    pattern: str
    lowest: int
    counts: tuple[int, ...]
    zeros: int

    def smallest(self, share: float = LOST) -> float:
        """The power of two below which lies at most ``share`` of the squared norm; 0 where all gradients are zero."""
        rest = share * self.energy
        for i, energy in enumerate(self._energies):
            if energy > rest:
                return 2.0 ** (self.lowest + i)
            rest -= energy
        return 0.0

    @property
    def energy(self) -> float:
        """About the sum of squares."""
        return math.fsum(self._energies)

    @property
    def _energies(self) -> list[float]:
        return [count * 4.0 ** (self.lowest + i + 0.5) for i, count in enumerate(self.counts)]


@dataclass(frozen=True)
class ScaleRange:
    """The loss scales under which fp16 holds the gradients.

    Attributes:
        largest: Largest magnitude of any gradient of a module's output or of a parameter, unscaled.
        smallest: Magnitude below which lie gradients that carry one part in 10,000 of a module's squared gradient.
        lowest_scale: A smaller scale loses ``smallest`` to underflow.
        highest_scale: A larger one makes ``largest`` overflow.
        init: The scale to start with: a power of two, eight times below overflow.
    """

    largest: float
    smallest: float
    lowest_scale: float
    highest_scale: float
    init: float

    @property
    def is_empty(self) -> bool:
        """Whether no scale holds both ends."""
        return self.lowest_scale > self.highest_scale


class GradientRange:
    """Observes the gradients of module outputs; hand :meth:`observing` to the reference's passes.

    Attributes:
        largest: Largest gradient of an output, per module path.
        largest_parameter: Largest gradient of a parameter, per name.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Tensor] = {}
        self._zeros: dict[str, int] = {}
        self.largest: dict[str, float] = {}
        self.largest_parameter: dict[str, float] = {}

    def see_parameters(self, names: Iterable[str], gradients: Iterable[Tensor]) -> None:
        """Take gradients of parameters into account, unscaled."""
        for name, gradient in zip(names, gradients, strict=True):
            if gradient.numel():
                value = float(gradient.abs().max())
                self.largest_parameter[name] = max(self.largest_parameter.get(name, 0.0), value)

    @contextlib.contextmanager
    def observing(self, model: nn.Module) -> Iterator[None]:
        """Watch every module in one forward and backward."""
        with contextlib.ExitStack() as hooks:
            for path, module in model.named_modules():

                def hook(_module: nn.Module, _args: Any, output: Any, path: str = path) -> None:
                    for tensor in tensors_in(output):
                        if tensor.requires_grad and tensor.is_floating_point():
                            tensor.register_hook(lambda gradient: self._see(path, gradient))

                hooks.enter_context(module.register_forward_hook(hook))
            yield

    def _see(self, path: str, gradient: Tensor) -> None:
        magnitude = gradient.detach().abs().float().reshape(-1)
        if not magnitude.numel():
            return
        nonzero = magnitude > 0
        exponent = torch.frexp(magnitude)[1].long() - 1 - LOWEST
        bins = exponent.clamp(0, BINS - 1)[nonzero]
        counts = torch.bincount(bins, minlength=BINS).cpu()
        self._counts[path] = self._counts[path] + counts if path in self._counts else counts
        self._zeros[path] = self._zeros.get(path, 0) + int((~nonzero).sum())
        self.largest[path] = max(self.largest.get(path, 0.0), float(magnitude.max()))

    def histogram(self, pattern: str, paths: Iterable[str]) -> Histogram | None:
        """Magnitudes over the modules at some paths together, bins without counts at both ends left out.

        None where no gradient passed through any of them.
        """
        seen = [path for path in paths if path in self._counts]
        if not seen:
            return None
        counts = [int(n) for n in torch.stack([self._counts[path] for path in seen]).sum(0)]
        zeros = sum(self._zeros[path] for path in seen)
        used = [i for i, n in enumerate(counts) if n]
        if not used:
            return Histogram(pattern, 0, (), zeros)
        return Histogram(pattern, LOWEST + used[0], tuple(counts[used[0] : used[-1] + 1]), zeros)

    def scales(self) -> ScaleRange | None:
        """The loss scales for fp16, over all modules, or None where nothing was seen."""
        finite = {path: value for path, value in self.largest.items() if 0.0 < value < math.inf}
        if not finite:
            return None
        largest = max([*finite.values(), *self.largest_parameter.values()])
        histograms = [h for path in finite if (h := self.histogram(path, [path])) is not None]
        most = max(h.energy for h in histograms)
        smallest = min(h.smallest() for h in histograms if h.energy >= NEGLIGIBLE * most)
        fp16 = FORMATS["fp16"]
        highest = fp16.max / largest
        lowest = fp16.smallest_subnormal / smallest
        init = 2.0 ** math.floor(math.log2(highest / HEADROOM))
        return ScaleRange(largest, smallest, lowest, highest, min(max(init, 2.0**-14), 2.0**24))
