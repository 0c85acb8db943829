"""How a loss scale moves: once as a pure function of numbers, once as operations on the device.

The two are tested against each other, and both against torch's own kernel. The rule is torch's with three additions
that do nothing at their defaults: *hysteresis* (overflows that are forgiven before the scale shrinks), a *floor* and a
*ceiling*.

Source: dynamic loss scaling, Micikevicius et al., "Mixed Precision Training", 2018, section 3.2; hysteresis as in
Colossal-AI's ``DynamicGradScaler``, which counts overflows until the scale grows.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

__all__ = ["ScalePolicy", "ScaleState", "next_state", "update_on_device"]


@dataclass(frozen=True)
class ScalePolicy:
    """The constants of the rule; the fields mean what they mean in :class:`castwise.LossScale`."""

    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 1
    floor: float | None = None
    ceiling: float | None = None
    dynamic: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether this is torch's own rule, which torch's own kernel carries out."""
        return self.dynamic and self.hysteresis == 1 and self.floor is None and self.ceiling is None


@dataclass(frozen=True)
class ScaleState:
    """A loss scale at one moment.

    Attributes:
        scale: The factor on the loss, an fp32 number.
        growth_tracker: Updates with finite gradients since the scale last moved.
        hysteresis_tracker: Updates with non-finite gradients since the scale last grew.
    """

    scale: float
    growth_tracker: int = 0
    hysteresis_tracker: int = 0


def next_state(state: ScaleState, found_inf: bool, policy: ScalePolicy) -> ScaleState:
    """The state after one update.

    Args:
        state: Before it.
        found_inf: Whether a gradient of the update was not finite.
        policy: The rule's constants.

    Returns:
        The state that the device would hold, bit for bit: products are rounded to fp32.
    """
    if not policy.dynamic:
        return state
    scale, growth, hysteresis = state.scale, state.growth_tracker, state.hysteresis_tracker
    if found_inf:
        hysteresis += 1
        growth = 0
        if hysteresis >= policy.hysteresis:
            scale = ctypes.c_float(scale * policy.backoff).value
            if policy.floor is not None:
                scale = max(scale, policy.floor)
    else:
        growth += 1
        if growth == policy.interval:
            grown = ctypes.c_float(scale * policy.growth).value
            scale = grown if math.isfinite(grown) else scale
            growth = hysteresis = 0
            if policy.ceiling is not None:
                scale = min(scale, policy.ceiling)
    return ScaleState(scale, growth, hysteresis)


def update_on_device(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor | None,
    found_inf: torch.Tensor,
    policy: ScalePolicy,
) -> None:
    """The same, in place on the device's tensors and without waiting for it.

    Args:
        scale: 0-dim fp32.
        growth_tracker: 0-dim int32.
        hysteresis_tracker: 0-dim int32; not needed by a plain policy.
        found_inf: 0-dim fp32; above zero where a gradient was not finite.
        policy: The rule's constants.
    """
    if not policy.dynamic:
        return
    if policy.is_plain:
        torch._amp_update_scale_(
            scale, growth_tracker, found_inf, policy.growth, policy.backoff, policy.interval
        )
        return
    assert hysteresis_tracker is not None
    found = found_inf > 0
    overflows = hysteresis_tracker + found
    good = growth_tracker + 1
    grow = ~found & (good == policy.interval)
    grown = (scale.double() * policy.growth).float()
    grown = torch.where(torch.isfinite(grown), grown, scale)
    if policy.ceiling is not None:
        grown = grown.clamp(max=policy.ceiling)
    shrunk = (scale.double() * policy.backoff).float()
    if policy.floor is not None:
        shrunk = shrunk.clamp(min=policy.floor)
    shrink = found & (overflows >= policy.hysteresis)
    scale.copy_(torch.where(shrink, shrunk, torch.where(grow, grown, scale)))
    growth_tracker.copy_(torch.where(found | grow, 0, good))
    hysteresis_tracker.copy_(torch.where(grow, 0, overflows))
