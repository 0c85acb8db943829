"""``colossalai.nn.lr_scheduler``: learning-rate schedulers with and without warmup."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from castwise.bridges.compat.coverage import missing_attribute
from castwise.errors import PlanError

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "LinearWarmupLR",
]
__getattr__ = missing_attribute("colossalai.nn.lr_scheduler")


class LinearWarmupLR(LRScheduler):
    """Increases the learning rate linearly during warmup, then decreases it linearly to zero, where it stays.

    With w warmup steps and T steps in total, the learning rate in step e is (e+1)/(w+1) of the group's initial rate while
    e < w, and (T-e)/(T-w) of that rate from then on. ``last_epoch`` is the last step made, or -1 at the start.

    Raises:
        PlanError: ``total_steps`` is less than 1, or ``warmup_steps`` is negative.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        if total_steps < 1 or warmup_steps < 0:
            raise PlanError(
                f"LinearWarmupLR(total_steps={total_steps!r}, warmup_steps={warmup_steps!r}): needs total_steps >= 1 and "
                "warmup_steps >= 0"
            )
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group in the current step."""
        step, total, warmup = self.last_epoch, self.total_steps, self.warmup_steps
        if step < warmup:
            factor = (step + 1) / (warmup + 1)
        else:
            # Colossal-AI divides by zero if all steps are warmup, and its rate falls below zero after the last step
            factor = max(0.0, (total - step) / (total - warmup)) if total > warmup else 0.0
        return [factor * rate for rate in self.base_lrs]


class CosineAnnealingLR(lr_scheduler.CosineAnnealingLR):
    """``torch.optim.lr_scheduler.CosineAnnealingLR``, whose ``T_max`` is called ``total_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        eta_min: float = 0.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min=eta_min, last_epoch=last_epoch)


class CosineAnnealingWarmupLR(LRScheduler):
    """Increases the learning rate linearly during warmup, then decreases it as torch's ``CosineAnnealingLR`` does.

    With w warmup steps, the learning rate in step e is (e+1)/w of the group's initial rate while e < w. The cosine then takes
    ``total_steps - w`` steps. If all steps are warmup, the learning rate stays at ``eta_min`` after them.

    Raises:
        PlanError: ``warmup_steps`` is negative.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        if warmup_steps < 0:
            raise PlanError(
                f"CosineAnnealingWarmupLR(warmup_steps={warmup_steps!r}): needs warmup_steps >= 0"
            )
        self.total_steps = total_steps
        self.warmup_steps = int(warmup_steps)
        self.eta_min = eta_min
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group in the current step."""
        step, warmup = self.last_epoch, self.warmup_steps
        if step < warmup:
            return [(step + 1) / warmup * rate for rate in self.base_lrs]
        period = self.total_steps - warmup
        share = (1 + math.cos(math.pi * (step - warmup) / period)) / 2 if period > 0 else 0.0
        return [self.eta_min + (rate - self.eta_min) * share for rate in self.base_lrs]
