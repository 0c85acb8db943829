"""Loss scaling: a pure rule that updates the scale, and the GradScaler that applies it.

``state``: the rule, as a function and as device operations. ``grad_scaler``: the scaler, which keeps the scales of
named losses (``losses``), the non-finite flags of each optimizer (``flags``) and the unscaling (``unscaling``).
``gradients``: operations on gradients. ``result`` and ``outcomes``: whether a step was made or skipped, for one step
and over time. ``closure``: steps of optimizers that evaluate the loss themselves. ``window``: which gradients hold a
scale, and which scale; ``held``: the same for one optimizer's parameters. ``buffers``: restores buffers after a skipped
step. ``watch``: steps outside ``Amp.step``. ``step_guard``: the scaler of plans without a loss scale. ``foreign``:
state dicts of Apex and Colossal-AI.
"""

from __future__ import annotations

from castwise.core.scaler.buffers import Buffers
from castwise.core.scaler.foreign import from_apex, from_colossalai, to_apex, to_colossalai
from castwise.core.scaler.grad_scaler import GradScaler
from castwise.core.scaler.gradients import add_up, check_and_multiply, set_aside
from castwise.core.scaler.result import StepResult
from castwise.core.scaler.state import ScalePolicy, ScaleState, next_state
from castwise.core.scaler.step_guard import StepGuard
from castwise.core.scaler.watch import Watch, inside, watch_closure
from castwise.core.scaler.window import Window

__all__ = [
    "Buffers",
    "GradScaler",
    "ScalePolicy",
    "ScaleState",
    "StepGuard",
    "StepResult",
    "Watch",
    "Window",
    "add_up",
    "check_and_multiply",
    "from_apex",
    "from_colossalai",
    "inside",
    "next_state",
    "set_aside",
    "to_apex",
    "to_colossalai",
    "watch_closure",
]
