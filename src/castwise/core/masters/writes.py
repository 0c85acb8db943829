"""Writes through ``parameter.data``, which are no writes to the parameter in torch."""

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
    """What was given out as the ``data`` of one parameter, and how often that was written.

    Each counts its own writes, as in torch: if they counted together, a write through one would fail a backward that needs
    what was read through another.
    """

    def __init__(self) -> None:
        self._out: list[tuple[TensorWeakRef, Tensor]] = []
        self._past = 0
        self._enough = _FEW

    def alias(self, data: Tensor) -> Tensor:
        """The same memory, followed."""
        counter = _own_data.__get__(_NOTHING)
        alias = _torch.tensors.counted_alias(data, counter)
        self._out.append((TensorWeakRef(alias), counter))
        if len(self._out) > self._enough:
            self._let_go()
        return alias

    @property
    def count(self) -> int:
        """How often it was written through all that was given out."""
        out = self._out
        return (
            self._past + sum(_torch.tensors.versions([counter for _, counter in out])) if out else self._past
        )

    def _let_go(self) -> None:
        """Of a tensor that is no longer held, nor a view of it, only the count is kept."""
        with _lock:
            known = len(self._out)
            held = [(alias, counter) for alias, counter in self._out[:known] if alias() is not None]
            total = self.count
            self._out[:known] = held
            self._past += total - self.count
            self._enough = max(_FEW, 2 * len(held))
