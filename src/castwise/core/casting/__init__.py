"""Run operators under a plan, at the dispatcher's native speed.

``context``: the :class:`autocast` block. ``ambient``: casts outside of any block. ``functions``: decorators for user
functions. ``frames``: the active precision of a thread; ``backward``: the same while a forward is recomputed.
``kernels``: operator overrides. ``tracing``: frames under torch.compile. ``trees``: casts through containers.
"""

from __future__ import annotations

from castwise.core._torch.hooks import hook_first
from castwise.core.casting.ambient import AmbientAutocast
from castwise.core.casting.context import autocast, default_device_type
from castwise.core.casting.functions import (
    custom_bwd,
    custom_fwd,
    fp32_function,
    lower_function,
    widest_function,
)

__all__ = [
    "AmbientAutocast",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "default_device_type",
    "fp32_function",
    "hook_first",
    "lower_function",
    "widest_function",
]
