"""Loss scaling: a pure rule for the scale, and the GradScaler around it.

``state``: the rule, as a function and as device operations. ``result``: what became of a step. ``grad_scaler``: the
scaler. ``closure``: steps that evaluate the loss themselves. ``foreign``: state dicts of Apex and Colossal-AI.
"""

from __future__ import annotations

from castwise.scaler.foreign import from_apex, from_colossalai, to_apex, to_colossalai
from castwise.scaler.grad_scaler import GradScaler
from castwise.scaler.result import StepResult
from castwise.scaler.state import ScalePolicy, ScaleState, next_state

__all__ = [
    "GradScaler",
    "ScalePolicy",
    "ScaleState",
    "StepResult",
    "from_apex",
    "from_colossalai",
    "next_state",
    "to_apex",
    "to_colossalai",
]
