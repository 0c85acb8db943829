"""Find losses that are already scaled when a session gets them, by a leftover GradScaler or by the session itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from castwise.core import _torch
from castwise.errors import PlanError, StateError

_scaled: Any = WeakTensorKeyDictionary()
_any = False
running = 0
"""Number of running backward passes of sessions, during which no scaled loss may appear."""
_WORDS = (
    "this loss has been scaled already, so gradients would be too large by the factor of that scale. Remove the GradScaler and its scale() "
    "from the loop: amp.backward(loss) does what the plan needs"
)


def watch(log: Callable[[Callable[[], None]], object]) -> None:
    """Record losses that a GradScaler scales; ``log`` gets the undo entry first."""
    log(lambda: _torch.optimizers.scaling.remove(note))
    _torch.optimizers.scaling.add(note)


def note(scaled: Any) -> None:
    """Record losses that were scaled: a tensor, or several. Tensors computed from them are found in backward."""
    global _any
    if running:
        return  # the session's scaling
    if not isinstance(scaled, torch.Tensor):
        for each in scaled if isinstance(scaled, (list, tuple)) else ():
            note(each)
    elif scaled not in _scaled:
        _scaled[scaled] = _any = True
        if scaled.requires_grad:
            scaled.register_hook(_refuse_within)


def check_loss(call: str, loss: Any) -> None:
    """Refuse a loss that is complex, or scaled already.

    Raises:
        PlanError: The loss is complex.
        StateError: The loss is scaled already.
    """
    if not isinstance(loss, torch.Tensor):
        return
    if loss.is_complex():
        raise PlanError(
            f"{call}: the loss is complex ({str(loss.dtype).removeprefix('torch.')}); a real scalar is needed. Take loss.real or "
            "loss.abs()."
        )
    if _any and loss in _scaled:
        raise StateError(f"{call}: {_WORDS}.")


def _refuse_within(_: torch.Tensor) -> None:
    if running:
        raise StateError(f"backward: {_WORDS}.")
