"""Scale losses, unscale gradients, and skip steps whose gradients are not finite.

- ``state`` holds the rule that updates the loss scale, as a function of numbers and as device operations.
- ``grad_scaler`` holds castwise's GradScaler. It uses ``losses`` (one scale for each named loss), ``flags`` (whether
  the gradients of each optimizer are finite) and ``unscaling``.
- ``gradients`` holds operations on gradients.
- ``result`` and ``outcomes`` tell whether steps were made or skipped, for one step and over time.
- ``closure`` handles steps of optimizers that evaluate the loss themselves.
- ``window`` keeps track of which gradients are multiplied by a loss scale, and by which; ``held`` does so for the
  parameters of one optimizer.
- ``buffers`` restores buffers after a skipped step.
- ``watch`` guards steps that are not made by ``Amp.step``.
- ``step_guard`` holds the scaler of plans without a loss scale.
- ``foreign`` converts state dicts of Apex and Colossal-AI.
"""

from __future__ import annotations

from castwise.core.scaler.buffers import Buffers
from castwise.core.scaler.foreign import from_apex, from_colossalai, to_apex, to_colossalai
from castwise.core.scaler.grad_scaler import GradScaler
from castwise.core.scaler.gradients import add_up, check_and_multiply, set_aside
from castwise.core.scaler.nested import inside
from castwise.core.scaler.result import StepResult
from castwise.core.scaler.state import ScalePolicy, ScaleState, next_state
from castwise.core.scaler.step_guard import StepGuard
from castwise.core.scaler.watch import Watch, is_watched, watch_closure
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
    "is_watched",
    "next_state",
    "set_aside",
    "to_apex",
    "to_colossalai",
    "watch_closure",
]
