"""Loss scaling: a pure rule for the scale, and the GradScaler around it.

``state``: the rule, as a function and as device operations. ``grad_scaler``: the scaler, which keeps the scales of named losses
(``losses``), what is known of each optimizer's gradients (``flags``), and what unscales them (``unscaling``). ``gradients``:
operations on them. ``result`` and ``outcomes``: what became of a step, and of all so far. ``closure``: steps that evaluate the loss themselves. ``window``: whose gradients there
are, at which scale; ``held``: which of one optimizer's hold it. ``buffers``: what a skipped step must not leave poisoned.
``watch``: steps outside ``Amp.step``. ``step_guard``: the scaler of plans without a loss scale.
``foreign``: state dicts of Apex and Colossal-AI.
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
