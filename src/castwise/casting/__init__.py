"""Run operators by a plan, at the dispatcher's native speed.

``context``: the :class:`autocast` region. ``ambient``: casts outside of any region. ``functions``: decorators for
functions of one's own. ``frames``: what is in force on a thread. ``kernels``: operator overrides. ``tracing``: what
torch.compile is told of frames. ``trees``: casts through containers.
"""

from __future__ import annotations

from castwise.casting.ambient import AmbientAutocast
from castwise.casting.context import autocast
from castwise.casting.functions import custom_bwd, custom_fwd, fp32_function, lower_function, widest_function

__all__ = [
    "AmbientAutocast",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "fp32_function",
    "lower_function",
    "widest_function",
]
