"""The optimizer wrapper that ``handle.wrap_optimizer`` returns, for loss scaling as in Apex's first API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from castwise.bridges.compat.apex.amp import stash
from castwise.bridges.compat.apex.amp.scaler import LossScaler

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """Wraps an optimizer, scales the losses of its steps, and skips steps whose gradients are infinite or NaN.

    In each step, the first call of :meth:`scale_loss` uses the first loss scale, the second call the second one, and so
    on. There are ``num_loss`` scales. All attributes that this class does not define are those of the wrapped
    optimizer.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        if not hasattr(optimizer, "_amp_stash"):
            stash.equip(optimizer, has_masters=False)
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._loss_idx = 0
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Return a context manager that scales the next loss of this step, and unscales the gradients on exit.

        Raises:
            RuntimeError: There were more losses than ``num_loss`` since the last step.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        index, count = self._loss_idx, len(self._loss_scaler)
        if index >= count:
            raise RuntimeError(
                f"optimizer.scale_loss: loss {index + 1} since the last step, but wrap_optimizer was given "
                f"num_loss={count}; give it the number of losses per step"
            )
        with stash.Scaled(loss, [self._optimizer], self._loss_scaler[index], index) as scaled:
            yield scaled
        self._loss_idx += 1

    def step(self, closure: Any = None) -> Any:
        """Make an optimizer step, or skip it if a loss since the last step had infinite or NaN gradients.

        Raises:
            NotImplementedError: A closure is given while the casts of ``O1`` are active.
        """
        self._loss_idx = 0
        if closure is None:
            return self._optimizer.step()
        if self._amp_handle.is_active():
            raise NotImplementedError("The `closure` argument is unsupported by the amp optimizer wrapper.")
        return self._optimizer.step(closure)

    def __getattr__(self, attr: str) -> Any:
        return getattr(self._optimizer, attr)

    def __repr__(self) -> str:
        return repr(self._optimizer)
