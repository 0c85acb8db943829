"""What the drop-in keeps with an optimizer, and the step that may be skipped."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from castwise.compat.apex.amp._amp_state import _amp_state, maybe_print
from castwise.compat.apex.amp.ambient import FORMATS
from castwise.compat.apex.amp.scaler import LossScaler
from castwise.masters import copy_to_model, model_param_of
from castwise.scaler import add_up, set_aside

__all__ = ["Aside", "Stash", "equip", "set_gradients_aside", "skip_next_step", "unscale_gradients"]

Aside = list[tuple[torch.Tensor, torch.Tensor]]
_CLOSURE = "Currently, Amp does not support closure use with optimizers."


class Stash:
    """``optimizer._amp_stash``: named as in Apex, since scripts look into it.

    Attributes:
        has_masters: Whether the options ask for fp32 masters.
        params_have_scaled_gradients: A backward pass with ``delay_unscale`` has left scaled gradients.
        already_patched: The next step will be skipped.
        lazy_init_called: True; masters are made by ``initialize``.
    """

    def __init__(self, optimizer: Any, has_masters: bool) -> None:
        self._optimizer = optimizer
        self.has_masters = has_masters
        self._overflow: tuple[int, LossScaler] | None = None
        self.params_have_scaled_gradients = False
        self.lazy_init_called = True

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped."""
        return self._overflow is not None

    def _params(self) -> Iterable[torch.Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """The masters."""
        return [p for p in self._params() if model_param_of(p) is not p]

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """The model's parameters in half: those that have masters, or those in the optimizer itself."""
        return [p for p in map(model_param_of, self._params()) if p.dtype in FORMATS]

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """Parameters stored in fp32."""
        return [p for p in self._params() if model_param_of(p) is p and p.dtype not in FORMATS]

    all_fp32_params = all_fp32_from_fp32_params

    def skip(self, loss_id: int, scaler: LossScaler) -> None:
        """Skip the next step, once, whatever number of losses ask for it."""
        if self._overflow is None:
            self._overflow = (loss_id, scaler)

    def take_skip(self) -> tuple[int, LossScaler] | None:
        """Which loss overflowed, if this step is to be skipped; the next one will not be."""
        overflow, self._overflow = self._overflow, None
        return overflow


def equip(optimizer: Any, has_masters: bool) -> None:
    """Give an optimizer its stash and a step that can be skipped.

    Args:
        optimizer: A torch optimizer, or LARC around one.
        has_masters: Whether the options ask for fp32 masters.

    Raises:
        RuntimeError: It has been given to ``initialize`` before.
    """
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
    optimizer._amp_stash = Stash(optimizer, has_masters)
    # A bound method with the attributes of the one it replaces: torch's schedulers look for both.
    optimizer.step = types.MethodType(_skippable(optimizer.step), optimizer)
    for name, method in (
        ("_amp_lazy_init", lambda self: None),
        ("_prepare_amp_backward", lambda self: None),
        ("_master_params_to_model_params", _copy_masters),
    ):
        setattr(optimizer, name, types.MethodType(method, optimizer))


def _copy_masters(optimizer: Any) -> None:
    copy_to_model(getattr(optimizer, "optim", optimizer))


def _skippable(step: Callable[..., Any]) -> Callable[..., Any]:
    # step is bound already; only what it says of itself is copied.
    @functools.wraps(getattr(step, "__func__", step))
    def skippable_step(self: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        stash: Stash = self._amp_stash
        overflow = stash.take_skip()
        if closure is not None and (stash.has_masters or any(s.dynamic for s in _amp_state.loss_scalers)):
            raise RuntimeError(_CLOSURE)
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
    params: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            params += group["params"]
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
    if aside:
        add_up(aside)
    for optimizer in optimizers:
        optimizer._amp_stash.params_have_scaled_gradients = False


def skip_next_step(optimizers: Iterable[Any], loss_id: int, scaler: LossScaler) -> None:
    """Have each of the optimizers skip its next step."""
    for optimizer in optimizers:
        optimizer._amp_stash.skip(loss_id, scaler)
