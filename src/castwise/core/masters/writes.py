"""Count writes through ``parameter.data``, which do not raise the parameter's version counter in torch."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from castwise.core import _torch

_own_data: Any = torch.Tensor.data
_NOTHING = torch.empty(0, device="cpu")
"""A tensor that can take the memory of a tensor on any of torch's own devices."""
_FEW = 16
_lock = threading.Lock()


@functools.cache
def _nothing(device_type: str) -> Tensor:
    return torch.empty(0, device=device_type)


class DataWrites:
    """Counts the writes through all tensors that were returned as ``parameter.data`` of one parameter.

    Each returned tensor has a version counter of its own, as in torch. With a shared counter, a write through one
    tensor would make a backward pass fail that has saved another.
    """

    aliases = 0
    """The number of tensors that were returned as ``parameter.data`` of any parameter with a master in this process."""

    def __init__(self) -> None:
        self._out: list[tuple[TensorWeakRef, Tensor]] = []
        self._past = 0
        self._enough = _FEW

    def alias(self, data: Tensor) -> Tensor:
        """Return a tensor with the same memory as ``data``, whose writes are counted."""
        kind = data.device.type
        counter = _own_data.__get__(
            _NOTHING if kind != _torch.dynamo.custom_backend_name() else _nothing(kind)
        )
        alias = _torch.tensors.counted_alias(data, counter)
        self._out.append((TensorWeakRef(alias), counter))
        DataWrites.aliases += 1
        if len(self._out) > self._enough:
            self._let_go()
        return alias

    @property
    def is_used(self) -> bool:
        """Whether :meth:`alias` has ever returned a tensor."""
        return bool(self._out or self._past)

    @property
    def count(self) -> int:
        """The number of writes so far through all tensors that :meth:`alias` returned."""
        out = self._out
        return (
            self._past + sum(_torch.tensors.versions([counter for _, counter in out])) if out else self._past
        )

    def _let_go(self) -> None:
        """Drop the counters of tensors that no longer exist, and add their write counts to a total."""
        with _lock:
            known = len(self._out)
            held = [(alias, counter) for alias, counter in self._out[:known] if alias() is not None]
            total = self.count
            self._out[:known] = held
            self._past += total - self.count
            self._enough = max(_FEW, 2 * len(held))
