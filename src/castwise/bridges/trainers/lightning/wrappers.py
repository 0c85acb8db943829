"""Helpers of the precision plug-in for Lightning's schedulers, optimizers and modules."""

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
    """The configuration of a learning-rate scheduler, which then pauses at skipped optimizer steps."""

    def __init__(self, config: LRSchedulerConfig, precision: Any) -> None:
        vars(self).update(vars(config))
        self._precision = precision

    @property
    def frequency(self) -> int:
        """The number of steps or epochs between scheduler steps.

        If the last optimizer step was skipped, the number is too large to reach.
        """
        last = self._precision.last_step
        rests = self.interval == "step" and last is not None and last.skipped
        return sys.maxsize if rests else vars(self)["frequency"]

    @frequency.setter
    def frequency(self, value: int) -> None:
        vars(self)["frequency"] = value


def unwrapped(optimizer: Any) -> Any:
    """Return the torch optimizer inside a ``LightningOptimizer`` or a Fabric optimizer. Others are returned unchanged."""
    wrapped = is_wrapped(optimizer) or isinstance(optimizer, LightningOptimizer)
    return optimizer.optimizer if wrapped else optimizer


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def evaluates(optimizer: Optimizer) -> bool:
    """Whether an optimizer's ``step`` requires a closure, with which it evaluates the loss itself, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def noting(closure: Callable[[], Any], values: list[Any]) -> Callable[[], Any]:
    """Return a closure that also appends each return value of ``closure`` to ``values``."""

    def note() -> Any:
        values.append(closure())
        return values[-1]

    return note


_saving: set[int] = set()


def save_masters(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace parameters in a state dict by their fp32 master weights, as a state-dict hook of a module.

    This is a plain function without state, so that modules with the hook can still be pickled.
    """
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
    """Raise if the script sets the precision of a module in another way too.

    Raises:
        StateError: ``torch.autocast`` is active, or an attribute of the module is a GradScaler.
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
