"""Wrappers that the plug-in puts around Lightning's schedulers, optimizers and modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.wrappers import is_wrapped
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise import Amp
from castwise.errors import StateError


class Resting(LRSchedulerConfig):
    """Configuration of a scheduler that pauses at skipped steps."""

    def __init__(self, config: LRSchedulerConfig, precision: Any) -> None:
        vars(self).update(vars(config))
        self._precision = precision

    @property
    def frequency(self) -> int:
        """Steps or epochs between scheduler steps; too large to reach if the last step was skipped."""
        last = self._precision.last_step
        rests = self.interval == "step" and last is not None and last.skipped
        return sys.maxsize if rests else vars(self)["frequency"]

    @frequency.setter
    def frequency(self, value: int) -> None:
        vars(self)["frequency"] = value


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a ``LightningOptimizer`` or a Fabric optimizer; other optimizers are returned unchanged."""
    wrapped = is_wrapped(optimizer) or isinstance(optimizer, LightningOptimizer)
    return optimizer.optimizer if wrapped else optimizer


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def evaluates(optimizer: Optimizer) -> bool:
    """Whether an optimizer evaluates the loss itself, as LBFGS does: its ``step`` needs a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def noting(closure: Callable[[], Any], values: list[Any]) -> Callable[[], Any]:
    """Wrap a closure to record each return value."""

    def note() -> Any:
        values.append(closure())
        return values[-1]

    return note


_saving: set[int] = set()


def save_masters(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """``state_dict`` hook that saves fp32 masters instead of their parameters; stateless, so modules still pickle."""
    amp = Amp.of(module)
    if amp is None or id(module) in _saving:
        return
    _saving.add(id(module))
    try:
        full = amp.model_state_dict(module)
    finally:
        _saving.discard(id(module))
    for key, value in full.items():
        if isinstance(state.get(prefix + key), Tensor) and state[prefix + key].dtype is not value.dtype:
            state[prefix + key] = value.detach()


def check_alone(module: nn.Module, amp: Amp) -> None:
    """Raise if anything else sets the precision of a module.

    Raises:
        StateError: The module runs in an autocast block, or has its own GradScaler.
    """
    kind = type(module).__name__
    if torch.is_autocast_enabled(amp.device_type):
        raise StateError(
            f"CastwisePrecision({str(amp.plan)!r}): {kind} is set up inside torch.autocast: two precision settings at once. "
            "Remove the autocast block; the plan casts"
        )
    for name, value in vars(module).items():
        if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
            raise StateError(
                f"CastwisePrecision({str(amp.plan)!r}): {kind}.{name} is a GradScaler: two loss scales at once. Remove it; "
                "a plan such as 'fp16-mixed' scales the loss"
            )
