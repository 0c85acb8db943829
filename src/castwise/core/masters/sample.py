"""Compare a few elements of every parameter with its fp32 master, to detect writes that torch does not count.

Such writes come from numpy, DLPack, or kernels of other libraries. A write to a whole parameter is detected at the next
comparison. A write to a part of a parameter is detected when the compared elements are in that part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

ELEMENTS = 8
"""The number of adjacent elements of a parameter's memory that are compared."""
READ = 64
"""The number of comparisons on an accelerator after which the host reads their common result."""


class Sample:
    """Compares a few elements of parameters with those of their fp32 masters.

    Args:
        targets: Values of the parameters, detached.
        sources: Values of their masters, of the same shapes.
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
        """Whether any compared element of a parameter differs from the rounded element of its fp32 master.

        On a CPU the result is immediate. On an accelerator, only every :data:`READ`-th call waits for the device and
        reports the differences that all calls since the last such call have found. The other calls do not report them.
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
        """Choose other elements to compare for one parameter. The parameters take turns."""
        if self._places:
            turn, number = divmod(self._looks, len(self._places))
            (low, full), at, (target, source), count = self._places[number]
            start = int((turn * 0.6180339887) % 1.0 * (target.numel() - count + 1))
            low[at], full[at] = target.narrow(0, start, count), source.narrow(0, start, count)
        self._looks += 1


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill one block of memory without gaps, in any order."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.layout is torch.strided and reach + 1 == tensor.numel()


def _flat(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view of a tensor's elements, in the order of their memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _differ(low: Tensor, rounded: Tensor) -> Tensor:
    return ((low != rounded) & (low == low)).any()  # NaN does not count, since it came from a step
