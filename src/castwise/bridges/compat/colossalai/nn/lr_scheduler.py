"""``colossalai.nn.lr_scheduler``: rates that warm up, and torch's own under Colossal-AI's arguments."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from castwise.bridges.compat.coverage import missing_attribute
from castwise.errors import PlanError

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
]
__getattr__ = missing_attribute("colossalai.nn.lr_scheduler")


class LinearWarmupLR(LRScheduler):
    """The rate rises linearly, then falls linearly to zero, where it stays.

    With w warm-up steps and T in total, step e has (e+1)/(w+1) of each group's rate while e < w, then (T-e)/(T-w).
    ``last_epoch`` is the last step made, -1 to begin.

    Raises:
        PlanError: Fewer steps in total than 1, or a negative warm-up.
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
        """The rates of this step, one per group."""
        step, total, warmup = self.last_epoch, self.total_steps, self.warmup_steps
        if step < warmup:
            factor = (step + 1) / (warmup + 1)
        else:
            # the original divides by zero where all steps are warm-up, and goes below zero after the last
            factor = max(0.0, (total - step) / (total - warmup)) if total > warmup else 0.0
        return [factor * rate for rate in self.base_lrs]


class CosineAnnealingLR(lr_scheduler.CosineAnnealingLR):
    """torch's, whose ``T_max`` is called ``total_steps`` here."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        eta_min: float = 0.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min=eta_min, last_epoch=last_epoch)


class MultiStepLR(lr_scheduler.MultiStepLR):
    """torch's; ``total_steps`` is taken for the original's sake."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, milestones, gamma=gamma, last_epoch=last_epoch)


class _Warmup(LRScheduler, ABC):
    """With w warm-up steps, step e has (e+1)/w of each group's rate while e < w."""

    def __init__(self, optimizer: Optimizer, warmup_steps: int, last_epoch: int) -> None:
        if warmup_steps < 0:
            raise PlanError(f"{type(self).__name__}(warmup_steps={warmup_steps!r}): needs warmup_steps >= 0")
        self.warmup_steps = int(warmup_steps)
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_lr(self) -> list[Any]:
        """The rates of this step, one per group."""
        step, warmup = self.last_epoch, self.warmup_steps
        if step < warmup:
            return [(step + 1) / warmup * rate for rate in self.base_lrs]
        return [self.rate_after(step, rate) for rate in self.base_lrs]

    @abstractmethod
    def rate_after(self, step: int, rate: Any) -> Any:
        """The rate of a step after the warm-up, in a group that begins with ``rate``."""


class CosineAnnealingWarmupLR(_Warmup):
    """The rate rises linearly for w steps, then follows torch's ``CosineAnnealingLR(T_max=total_steps - w)``.

    Where all steps are warm-up it stays at ``eta_min`` after them.

    Raises:
        PlanError: A negative warm-up.
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
        self.total_steps = total_steps
        self.eta_min = eta_min
        super().__init__(optimizer, warmup_steps, last_epoch)

    def rate_after(self, step: int, rate: Any) -> Any:
        """A cosine's half period from ``rate`` to ``eta_min``."""
        period = self.total_steps - self.warmup_steps
        if period <= 0:
            return self.eta_min
        share = (1 + math.cos(math.pi * (step - self.warmup_steps) / period)) / 2
        return self.eta_min + (rate - self.eta_min) * share


class MultiStepWarmupLR(_Warmup):
    """The rate rises linearly for ``warmup_steps``, then is multiplied by ``gamma`` at each milestone.

    Milestones are counted from the first step on; those within the warm-up are left out.

    Raises:
        PlanError: A negative warm-up, or no milestones.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        if not milestones:
            raise PlanError(
                f"MultiStepWarmupLR(milestones={milestones!r}): needs the steps at which the rate falls, such as [30, 60]"
            )
        self.milestones = sorted(step for step in milestones if step >= warmup_steps)
        self.gamma = gamma
        super().__init__(optimizer, warmup_steps, last_epoch)

    def rate_after(self, step: int, rate: Any) -> Any:
        """``rate`` times ``gamma`` for each milestone up to this step."""
        return rate * self.gamma ** bisect_right(self.milestones, step)
