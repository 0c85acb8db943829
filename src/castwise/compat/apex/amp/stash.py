"""What the drop-in keeps with an optimizer, and the step that may be skipped."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from castwise.compat.apex.amp._amp_state import _amp_state, master_params, maybe_print
from castwise.compat.apex.amp.ambient import FORMATS
from castwise.compat.apex.amp.models import base_of
from castwise.compat.apex.amp.scaler import LossScaler
from castwise.masters import copy_to_model, model_param_of
from castwise.scaler import add_up, set_aside

__all__ = ["Aside", "Stash", "equip", "scaled", "set_gradients_aside", "skip_next_step", "unscale_gradients"]

Aside = list[tuple[torch.Tensor, torch.Tensor]]


class Stash:
    """``optimizer._amp_stash``: named as in Apex, since scripts look into it.

    Attributes:
        has_masters: Whether the options ask for fp32 masters.
        params_have_scaled_gradients: A backward pass with ``delay_unscale`` has left scaled gradients.
        overflow: The loss, by number, and its scale for which the next step will be skipped; None if it will be made.
        lazy_init_called: True; masters are made by ``initialize``.
    """

    lazy_init_called = True

    def __init__(self, optimizer: Any, has_masters: bool) -> None:
        self._optimizer = optimizer
        self.has_masters = has_masters
        self.params_have_scaled_gradients = False
        self.overflow: tuple[int, LossScaler] | None = None

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped."""
        return self.overflow is not None

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """The masters."""
        return [p for p in master_params(self._optimizer) if model_param_of(p) is not p]

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """The model's parameters in half: those that have masters, or those in the optimizer itself."""
        return [p for p in map(model_param_of, master_params(self._optimizer)) if p.dtype in FORMATS]

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """Parameters stored in fp32."""
        params = master_params(self._optimizer)
        return [p for p in params if model_param_of(p) is p and p.dtype not in FORMATS]

    all_fp32_params = all_fp32_from_fp32_params


def equip(optimizer: Any, has_masters: bool) -> None:
    """Give a torch optimizer, or LARC around one, its stash and a step that can be skipped."""
    optimizer._amp_stash = Stash(optimizer, has_masters)
    # A bound method with the attributes of the one it replaces: torch's schedulers look for both.
    optimizer.step = types.MethodType(_skippable(optimizer.step), optimizer)
    for name, method in (
        ("_amp_lazy_init", lambda self: None),
        ("_prepare_amp_backward", lambda self: None),
        ("_master_params_to_model_params", lambda self: copy_to_model(base_of(self))),
    ):
        setattr(optimizer, name, types.MethodType(method, optimizer))


def _skippable(step: Callable[..., Any]) -> Callable[..., Any]:
    # step is bound already; only what it says of itself is copied.
    @functools.wraps(getattr(step, "__func__", step))
    def skippable_step(self: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        stash: Stash = self._amp_stash
        overflow, stash.overflow = stash.overflow, None
        if closure is not None and (stash.has_masters or any(s.dynamic for s in _amp_state.loss_scalers)):
            raise RuntimeError("Currently, Amp does not support closure use with optimizers.")
        if overflow is not None:
            loss_id, scaler = overflow
            maybe_print(
                f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale()}"
            )
            self._opt_called = True  # or torch's schedulers would warn of a step that never came
            return None
        args = args if closure is None else (closure, *args)
        handle = _amp_state.handle
        if handle is None:
            return step(*args, **kwargs)
        with handle.suspended():
            value = step(*args, **kwargs)
        handle._clear_cache()
        return value

    return skippable_step


# --- gradients ----------------------------------------------------------------------------------------------


def _params(optimizers: Sequence[Any]) -> list[torch.Tensor]:
    """Every parameter of some optimizers, once."""
    params = [parameter for optimizer in optimizers for parameter in master_params(optimizer)]
    if len(optimizers) > 1:
        params = list({id(parameter): parameter for parameter in params}.values())
    return params


def set_gradients_aside(optimizers: Sequence[Any]) -> Aside:
    """Take off the gradients that are unscaled already, so that a backward pass writes its own alone."""
    ready = [o for o in optimizers if not o._amp_stash.params_have_scaled_gradients]
    return set_aside(_params(ready)) if ready else []


def unscale_gradients(optimizers: Sequence[Any], scaler: LossScaler, aside: Aside) -> None:
    """Divide what a backward pass has left by its scale, and add the earlier gradients."""
    scaler.clear_overflow_state()
    scaler.unscale_([grad for parameter in _params(optimizers) if (grad := parameter.grad) is not None])
    add_up(aside)
    for optimizer in optimizers:
        optimizer._amp_stash.params_have_scaled_gradients = False


def skip_next_step(optimizers: Sequence[Any], loss_id: int, scaler: LossScaler) -> None:
    """Have each of the optimizers skip its next step, once, whatever number of losses ask for it."""
    for optimizer in optimizers:
        if optimizer._amp_stash.overflow is None:
            optimizer._amp_stash.overflow = (loss_id, scaler)


@contextlib.contextmanager
def scaled(loss: torch.Tensor, optimizer: Any, scaler: LossScaler, loss_id: int) -> Iterator[torch.Tensor]:
    """Scale one loss for its backward pass, as in Apex's first API; the casts of O1 rest inside the block."""
    if not hasattr(optimizer, "_amp_stash"):
        equip(optimizer, has_masters=False)
    handle = _amp_state.handle
    with handle.suspended():
        aside = set_gradients_aside([optimizer])
        try:
            yield loss.float() * scaler.loss_scale()
        except BaseException:
            add_up(aside)
            raise
        unscale_gradients([optimizer], scaler, aside)
        if scaler.update_scale():
            skip_next_step([optimizer], loss_id, scaler)
    handle._clear_cache()
