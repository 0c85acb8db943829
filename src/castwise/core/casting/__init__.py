"""Run operators under a precision plan, at the speed of torch's own autocast.

``context`` has the :class:`autocast` block, ``ambient`` casts outside of any block, and ``functions`` has decorators
for user functions. ``frames`` keeps the precision that is active on a thread, and ``backward`` keeps it while a
forward is recomputed during backward. ``kernels`` overrides how operators cast. ``tracing`` handles torch.compile.
``trees`` casts tensors inside containers.
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
