"""Update a loss scale by its rule, either as a pure function of numbers or as operations on the device.

The two are tested against each other, and both against torch's kernel. The rule is torch's with three additions that do
nothing at their defaults. With *hysteresis*, the scale shrinks only after several overflows. The scale stays between a
*floor* and a *ceiling*.

Source: dynamic loss scaling, Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; hysteresis as in
Colossal-AI's ``DynamicGradScaler``, which counts overflows until the scale grows.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from castwise.core import _torch
from castwise.core.devices import widest_dtype
from castwise.errors import PlanError


@dataclass(frozen=True)
class ScalePolicy:
    """The constants of the rule that updates a loss scale.

    The fields mean the same as in :class:`castwise.LossScale`.

    Raises:
        PlanError: The bounds or the hysteresis are invalid.
    """

    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    floor: float | None = None
    ceiling: float | None = None
    dynamic: bool = True

    def __post_init__(self) -> None:
        """Validate the fields that torch's scaler does not have."""
        if isinstance(self.hysteresis, bool) or not isinstance(self.hysteresis, int) or self.hysteresis < 1:
            raise PlanError(
                f"GradScaler(hysteresis={self.hysteresis!r}) is not allowed. Allowed: a whole number >= 1."
            )
        for name, bound in (("floor", self.floor), ("ceiling", self.ceiling)):
            if bound is not None and not (bound > 0 and math.isfinite(bound)):
                raise PlanError(
                    f"GradScaler({name}={bound!r}) is not allowed. Allowed: None, or a finite number > 0."
                )
        if self.floor is not None and self.ceiling is not None and self.floor > self.ceiling:
            raise PlanError(
                f"GradScaler(floor={self.floor!r}, ceiling={self.ceiling!r}) is not allowed: the floor is above the ceiling."
            )

    def bounded(self, scale: float) -> float:
        """Clamp a scale to floor and ceiling, both rounded to fp32."""
        if self.floor is not None:
            scale = max(scale, ctypes.c_float(self.floor).value)
        if self.ceiling is not None:
            scale = min(scale, ctypes.c_float(self.ceiling).value)
        return scale

    @property
    def is_plain(self) -> bool:
        """Whether the rule is that of torch's GradScaler, so that torch's kernel can apply it."""
        return self.dynamic and self.hysteresis == 1 and self.floor is None and self.ceiling is None


@dataclass(frozen=True)
class ScaleState:
    """A loss scale and its counters at one moment.

    Attributes:
        scale: The factor on the loss, an fp32 number.
        growth_tracker: Number of updates with finite gradients since the scale last changed.
        hysteresis_tracker: Number of updates with non-finite gradients since the scale last grew. They are counted only
            if the policy's hysteresis is above 1.
    """

    scale: float
    growth_tracker: int = 0
    hysteresis_tracker: int = 0

    def saved(self) -> dict[str, float]:
        """Return the state as a dict with the keys that a scaler's state dict has."""
        scale, growth, overflows = self.scale, self.growth_tracker, self.hysteresis_tracker
        return {"scale": scale, "_growth_tracker": growth, "hysteresis_tracker": overflows}


def next_state(state: ScaleState, found_inf: bool, policy: ScalePolicy) -> ScaleState:
    """Return the state that a loss scale has after one update.

    Products are rounded to fp32, so the result equals, bit for bit, what the device computes.

    Args:
        state: The loss scale and its counters before the update.
        found_inf: Whether any gradient was not finite.
        policy: The rule by which the scale grows and shrinks.
    """
    if not policy.dynamic:
        return state
    scale, growth, overflows = state.scale, state.growth_tracker, state.hysteresis_tracker
    if found_inf:
        overflows += 1
        growth = 0
        if overflows >= policy.hysteresis:
            scale = ctypes.c_float(scale * policy.backoff).value
    else:
        growth += 1
        if growth == policy.interval:
            grown = ctypes.c_float(scale * policy.growth).value
            scale = grown if math.isfinite(grown) else scale
            growth = overflows = 0
    if policy.hysteresis == 1:  # nothing to count
        overflows = state.hysteresis_tracker
    return ScaleState(policy.bounded(scale), growth, overflows)


def update_on_device(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor | None,
    found_inf: torch.Tensor,
    policy: ScalePolicy,
) -> None:
    """Update a loss scale and its counters in place, as :func:`next_state` does, without waiting for the device.

    Args:
        scale: The scale, 0-dim fp32.
        growth_tracker: The counter of updates with finite gradients, 0-dim int32.
        hysteresis_tracker: The counter of updates with non-finite gradients, 0-dim int32. It may be None if
            :attr:`ScalePolicy.is_plain` is true.
        found_inf: Whether a gradient was not finite: 0-dim fp32, above zero if so.
        policy: The constants of the rule.
    """
    if not policy.dynamic:
        return
    if policy.is_plain:
        _torch.grad_scaler.update_scale(
            scale, growth_tracker, found_inf, policy.growth, policy.backoff, policy.interval
        )
        return
    assert hysteresis_tracker is not None
    found = found_inf != 0
    overflows = hysteresis_tracker + found
    good = growth_tracker + 1
    grow = ~found & (good == policy.interval)
    wide = scale.to(widest_dtype(scale.device))
    grown = (wide * policy.growth).float()
    grown = torch.where(torch.isfinite(grown), grown, scale)
    shrunk = (wide * policy.backoff).float()
    shrink = found & (overflows >= policy.hysteresis)
    scale.copy_(torch.where(shrink, shrunk, torch.where(grow, grown, scale)))
    if policy.floor is not None or policy.ceiling is not None:
        scale.clamp_(policy.floor, policy.ceiling)
    growth_tracker.copy_(torch.where(found | grow, 0, good))
    if policy.hysteresis > 1:
        hysteresis_tracker.copy_(torch.where(grow, 0, overflows))
