"""A few elements of every parameter, compared with its master to detect writes that torch does not count.

Those are writes through numpy, DLPack, or kernels of other libraries. A write to a whole parameter is detected
at once, a write to a part of one when the sample reaches that part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

ELEMENTS = 8
"""Number of adjacent elements of a parameter's memory that are compared."""
READ = 64
"""On an accelerator, the host reads the result at every one of this many checks."""


class Sample:
    """Elements of parameters and their masters.

    Args:
        targets: Values of parameters, detached.
        sources: Values of their masters; of the same shapes.
    """

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._looks = 0
        self._places: list[tuple[tuple[list[Tensor], list[Tensor]], int, tuple[Tensor, Tensor], int]] = []
        lists: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = defaultdict(
            lambda: ([], [])
        )
        for target, source in zip(targets, sources, strict=True):
            if target.numel() and _is_dense(target) and target.stride() == source.stride():
                into = lists[target.device, target.dtype]
                flat = _flat(target), _flat(source)
                count = min(ELEMENTS, target.numel())
                self._places.append((into, len(into[0]), flat, count))
                for views, whole in zip(into, flat, strict=True):
                    views.append(whole.narrow(0, 0, count))
        self._lists = list(lists.values())
        self._seen: dict[torch.device, Tensor] = {}

    def differs(self) -> bool:
        """Whether any sampled parameter differs from its master, rounded.

        On a CPU the result is immediate. On an accelerator it is read at every :data:`READ`-th check, which waits for
        the device, for all checks since the last.
        """
        self._turn()
        found = False
        for targets, sources in self._lists:
            low = torch.cat(targets)
            rounded = torch.cat(sources).to(low.dtype)
            if low.device.type == "cpu":
                found = found or (not torch.equal(low, rounded) and bool(_differ(low, rounded)))
            else:
                differ = _differ(low, rounded)
                self._seen.setdefault(low.device, differ).logical_or_(differ)
        if self._seen and self._looks % READ == 0:
            found = any(map(bool, self._seen.values())) or found
            self._seen.clear()
        return found

    def _turn(self) -> None:
        """Choose other elements of one parameter, in turn."""
        if self._places:
            turn, number = divmod(self._looks, len(self._places))
            (low, full), at, (target, source), count = self._places[number]
            start = int((turn * 0.6180339887) % 1.0 * (target.numel() - count + 1))
            low[at], full[at] = target.narrow(0, start, count), source.narrow(0, start, count)
        self._looks += 1


def _is_dense(tensor: Tensor) -> bool:
    """Whether elements are contiguous in memory, in any order."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.layout is torch.strided and reach + 1 == tensor.numel()


def _flat(tensor: Tensor) -> Tensor:
    """The elements in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _differ(low: Tensor, rounded: Tensor) -> Tensor:
    return ((low != rounded) & (low == low)).any()  # a NaN came from a step
