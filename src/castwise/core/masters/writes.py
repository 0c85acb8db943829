"""Writes through ``parameter.data``, which torch does not count as writes to the parameter."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from castwise.core import _torch

_own_data: Any = torch.Tensor.data
_NOTHING = torch.empty(0, device="cpu")
_FEW = 16
_lock = threading.Lock()


class DataWrites:
    """The aliases that were returned as ``data`` of one parameter, and their write counts.

    Each has a separate version counter, as in torch: with a shared one, a write through one alias would make a backward
    fail that saved a tensor read through another.
    """

    def __init__(self) -> None:
        self._out: list[tuple[TensorWeakRef, Tensor]] = []
        self._past = 0
        self._enough = _FEW

    def alias(self, data: Tensor) -> Tensor:
        """An alias of the same memory whose writes are counted."""
        counter = _own_data.__get__(_NOTHING)
        alias = _torch.tensors.counted_alias(data, counter)
        self._out.append((TensorWeakRef(alias), counter))
        if len(self._out) > self._enough:
            self._let_go()
        return alias

    @property
    def count(self) -> int:
        """Number of writes through all aliases."""
        out = self._out
        return (
            self._past + sum(_torch.tensors.versions([counter for _, counter in out])) if out else self._past
        )

    def _let_go(self) -> None:
        """Keep only the write count of an alias that is no longer referenced."""
        with _lock:
            known = len(self._out)
            held = [(alias, counter) for alias, counter in self._out[:known] if alias() is not None]
            total = self.count
            self._out[:known] = held
            self._past += total - self.count
            self._enough = max(_FEW, 2 * len(held))
