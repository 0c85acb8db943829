"""Adapters that give the steps and the loss scale of a castwise session the interfaces that Accelerate expects.

A session is a :class:`castwise.Amp`.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from castwise import Amp, StepResult


def inner(optimizer: Optimizer) -> Optimizer:
    """Return the torch optimizer inside Accelerate's wrappers. Other optimizers are returned unchanged."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def updates_in_backward(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates weights inside the backward pass, as LOMO and AdaLomo do."""
    return hasattr(optimizer, "fused_backward")


def as_plain(kind: type, state: dict[str, Any]) -> tuple[Any, ...]:
    """Return a value for ``__reduce_ex__`` that unpickles as an object of class ``kind`` with the attributes ``state``."""
    return copyreg._reconstructor, (kind, object, None), state  # type: ignore[attr-defined]


class CastwiseOptimizer(AcceleratedOptimizer):
    """Wraps an optimizer so that a :class:`castwise.Amp` makes its steps in a script that uses Accelerate.

    Args:
        optimizer: The optimizer, which ``amp`` has prepared.
        amp: The :class:`castwise.Amp` that unscales the gradients and steps.
        device_placement: Whether to move the optimizer's state to the device, as in Accelerate.
    """

    result: StepResult | None = None
    """The result of the last step; None before the first step."""

    def __init__(self, optimizer: Optimizer, amp: Amp, device_placement: bool = True) -> None:
        super().__init__(optimizer, device_placement=device_placement)
        self.amp = amp

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle the wrapper as an instance of Accelerate's own class, which steps without a session."""
        _, _, state, *_ = super().__reduce_ex__(protocol)
        kept = {name: value for name, value in state.items() if name not in ("amp", "result")}
        return as_plain(AcceleratedOptimizer, kept)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Unscale the gradients if they are still scaled, and make a step.

        The step is skipped if a gradient is not finite. While Accelerate accumulates gradients, this method does
        nothing.

        Args:
            closure: A function that computes the loss again, as for :meth:`castwise.Amp.step`. It calls
                ``accelerator.backward``.

        Raises:
            StateError: The plan has a loss scale, and the gradients do not come from ``accelerator.backward``.
        """
        if self.gradient_state.sync_gradients and not updates_in_backward(self.optimizer):
            self.result = self.amp.step(self.optimizer, closure=closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, also for fused optimizers. Reading this waits for the device."""
        return self.result is not None and self.result.skipped


class SessionScaler:
    """Gives the loss scale of a :class:`castwise.Amp` the interface of a torch ``GradScaler``.

    Accelerate and the Trainer of transformers save, load and log it.

    Args:
        amp: The :class:`castwise.Amp`.
    """

    def __init__(self, amp: Amp) -> None:
        self._amp = amp
        self._before = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace this object by None in copies and pickles. For Accelerate, None means that losses are not scaled."""
        return type(None), ()

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps, including those that a loaded checkpoint has counted."""
        return self._before + self._amp.skipped_steps

    @property
    def restored_buffers(self) -> dict[str, int]:
        """The number of times that each buffer was restored after a skipped step, by name.

        See :attr:`castwise.Amp.restored_buffers`.
        """
        return self._amp.restored_buffers

    def is_enabled(self) -> bool:
        """Whether the plan has a loss scale."""
        return self._amp.scaler.is_enabled()

    def get_scale(self) -> float:
        """Return the scale by which the next loss is multiplied, or 1.0 if the plan has no loss scale.

        Reading it waits for the device.
        """
        return self._amp.get_scale()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the loss scale, as :meth:`castwise.Amp.scale` does."""
        return self._amp.scale(loss)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale, as :meth:`castwise.Amp.unscale_` does."""
        self._amp.unscale_(inner(optimizer))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the :class:`castwise.Amp`, the number of skipped steps, and the fields of a torch ``GradScaler``."""
        return {
            **self._amp.scaler.state_dict(), **self._amp.state_dict(), "skipped_steps": self.skipped_steps
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that this class, or a torch ``GradScaler`` in a training without castwise, has saved.

        Raises:
            CheckpointError: The state is of another kind.
        """
        if "_growth_tracker" in state and "version" not in state:
            state = {"version": 1, "plan": None, "scaler": dict(state)}
        self._amp.load_state_dict(state)
        self._before = state.get("skipped_steps", 0) - self._amp.skipped_steps
