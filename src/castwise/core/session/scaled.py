"""Raise if a loss that is passed to an :class:`~castwise.Amp` was scaled already, by a GradScaler or by the Amp itself."""

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
"""The number of calls of ``Amp.backward`` that are running. Inside them, no gradient may reach a scaled loss."""
_WORDS = (
    "this loss has been scaled already, so gradients would be too large by the factor of that scale. Remove the GradScaler and its scale() "
    "from the loop: amp.backward(loss) does what the plan needs"
)


def watch(log: Callable[[Callable[[], None]], object]) -> None:
    """Record all losses that a GradScaler scales from now on.

    Before that, ``log`` is called with a function that stops the recording.
    """
    log(lambda: _torch.optimizers.scaling.remove(note))
    _torch.optimizers.scaling.add(note)


def note(scaled: Any) -> None:
    """Record a scaled loss, or several, so that passing it to an Amp raises an error.

    Tensors that were computed from it are recognised in their backward pass.
    """
    global _any
    if running:
        return  # Amp.backward itself scales the loss
    if not isinstance(scaled, torch.Tensor):
        for each in scaled if isinstance(scaled, (list, tuple)) else ():
            note(each)
    elif scaled not in _scaled:
        _scaled[scaled] = _any = True
        if scaled.requires_grad:
            scaled.register_hook(_refuse_within)


def check_loss(call: str, loss: Any) -> None:
    """Raise if a loss is complex, or was scaled already. ``call`` names the function in the error.

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
