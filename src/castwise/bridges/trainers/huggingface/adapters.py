"""Adapters that give a session's steps and loss scale the interfaces that Accelerate expects."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from castwise import Amp, StepResult


def inner(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def updates_in_backward(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates weights inside the backward, as LOMO and AdaLomo do."""
    return hasattr(optimizer, "fused_backward")


def as_plain(kind: type, state: dict[str, Any]) -> tuple[Any, ...]:
    """Return value for ``__reduce_ex__`` that unpickles as another class with these attributes."""
    return copyreg._reconstructor, (kind, object, None), state  # type: ignore[attr-defined]


class CastwiseOptimizer(AcceleratedOptimizer):
    """An optimizer that steps through the session.

    Args:
        optimizer: The optimizer that the session prepared.
        amp: The session.
        device_placement: As in Accelerate.
    """

    result: StepResult | None = None
    """Result of the last step; None before the first."""

    def __init__(self, optimizer: Optimizer, amp: Amp, device_placement: bool = True) -> None:
        super().__init__(optimizer, device_placement=device_placement)
        self.amp = amp

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle as Accelerate's own class, which steps without a session."""
        _, _, state, *_ = super().__reduce_ex__(protocol)
        kept = {name: value for name, value in state.items() if name not in ("amp", "result")}
        return as_plain(AcceleratedOptimizer, kept)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Unscale if needed, then step, or skip if a gradient is not finite.

        Args:
            closure: As for :meth:`castwise.Amp.step`, with ``accelerator.backward`` inside.

        Raises:
            StateError: The plan has a loss scale, and the gradients do not come from ``accelerator.backward``.
        """
        if self.gradient_state.sync_gradients and not updates_in_backward(self.optimizer):
            self.result = self.amp.step(self.optimizer, closure=closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, also for fused optimizers; reading it synchronises with the device."""
        return self.result is not None and self.result.skipped


class SessionScaler:
    """A session's loss scale with the interface that Accelerate and the Trainer use to save, load and log a scaler.

    Args:
        amp: The session.
    """

    def __init__(self, amp: Amp) -> None:
        self._amp = amp
        self._before = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as None, Accelerate's value for an unscaled loss."""
        return type(None), ()

    @property
    def skipped_steps(self) -> int:
        """Number of skipped steps, including those before a loaded checkpoint."""
        return self._before + self._amp.skipped_steps

    @property
    def restored_buffers(self) -> dict[str, int]:
        """How often each buffer was restored after a skipped step; see :attr:`castwise.Amp.restored_buffers`."""
        return self._amp.restored_buffers

    def is_enabled(self) -> bool:
        """Whether the plan has a loss scale."""
        return self._amp.scaler.is_enabled()

    def get_scale(self) -> float:
        """The scale of the next loss, 1.0 if the plan has no loss scale; synchronises with the device."""
        return self._amp.get_scale()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by its scale, as :meth:`castwise.Amp.scale` does."""
        return self._amp.scale(loss)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by their scale, as :meth:`castwise.Amp.unscale_` does."""
        self._amp.unscale_(inner(optimizer))

    def state_dict(self) -> dict[str, Any]:
        """The session's state, the number of skipped steps, and the fields that a torch ``GradScaler`` reads."""
        return {
            **self._amp.scaler.state_dict(), **self._amp.state_dict(), "skipped_steps": self.skipped_steps
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a session, or of the torch ``GradScaler`` of a run without castwise.

        Raises:
            CheckpointError: The state is neither.
        """
        if "_growth_tracker" in state and "version" not in state:
            state = {"version": 1, "plan": None, "scaler": dict(state)}
        self._amp.load_state_dict(state)
        self._before = state.get("skipped_steps", 0) - self._amp.skipped_steps
