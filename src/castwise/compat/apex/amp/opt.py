"""``handle.wrap_optimizer``: loss scaling as in Apex's first API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from castwise.compat.apex.amp._amp_state import maybe_print
from castwise.compat.apex.amp.scaler import LossScaler
from castwise.scaler import add_up, set_aside

__all__ = ["OptimWrapper"]


class OptimWrapper:
    """An optimizer that scales its losses and skips steps by itself; other attributes are the optimizer's.

    Args:
        optimizer: A torch optimizer.
        amp_handle: Whose casts are in force.
        num_loss: Losses per step. Each has a scale of its own, by the order of the calls.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._skip_next = [False] * num_loss
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Scale the next loss of this step.

        Raises:
            RuntimeError: More losses than ``num_loss`` since the last step.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        index = self._loss_idx
        if index >= self._num_loss:
            raise RuntimeError(
                f"optimizer.scale_loss: loss {index + 1} since the last step, but wrap_optimizer was given "
                f"num_loss={self._num_loss}; give it the number of losses per step"
            )
        scaler = self._loss_scaler[index]
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        with self._amp_handle.suspended():
            aside = set_aside(params) if index else []
            yield loss.float() * scaler.loss_scale()
            scaler.clear_overflow_state()
            scaler.unscale_([p.grad for p in params if p.grad is not None])
            add_up(aside)
            self._skip_next[index] = scaler.update_scale()
        self._loss_idx += 1
        self._amp_handle._clear_cache()

    def step(self, closure: Any = None) -> Any:
        """Step, unless a loss has overflowed since the last one.

        Raises:
            NotImplementedError: With a closure.
        """
        if not self._amp_handle.is_active():
            return self._optimizer.step() if closure is None else self._optimizer.step(closure)
        self._loss_idx = 0
        if closure is not None:
            raise NotImplementedError("The `closure` argument is unsupported by the amp optimizer wrapper.")
        if any(self._skip_next):
            maybe_print("Gradient overflow, skipping update")
            self._skip_next = [False] * self._num_loss
            return None
        with self._amp_handle.suspended():
            value = self._optimizer.step()
        self._amp_handle._clear_cache()
        return value

    def __getattr__(self, attr: str) -> Any:
        return getattr(self._optimizer, attr)

    def __repr__(self) -> str:
        return repr(self._optimizer)
