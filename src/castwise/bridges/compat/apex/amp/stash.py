"""What ``apex.amp`` adds to an optimizer: the attribute ``_amp_stash``, and a step that can be skipped."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from castwise.bridges.compat.apex.amp._amp_state import _amp_state, master_params, maybe_print
from castwise.bridges.compat.apex.amp.ambient import FORMATS
from castwise.bridges.compat.apex.amp.models import base_of
from castwise.bridges.compat.apex.amp.scaler import LossScaler
from castwise.core.masters import copy_to_model, model_param_of
from castwise.core.scaler import add_up, set_aside

__all__ = ["Scaled", "Stash", "equip"]

_NO_CLOSURES = "Currently, Amp does not support closure use with optimizers."


class Stash:
    """The state that ``apex.amp`` keeps on an optimizer, as ``optimizer._amp_stash``. Scripts read it under Apex's names.

    Attributes:
        has_masters: Whether the options ask for fp32 master weights.
        params_have_scaled_gradients: Whether a backward pass with ``delay_unscale`` has left scaled gradients.
        overflow: None, or the index and the scaler of the loss whose gradients were not finite. The optimizer then skips its
            next step.
        lazy_init_called: True, since ``initialize`` has made the master weights already.
    """

    lazy_init_called = True

    def __init__(self, optimizer: Any, has_masters: bool) -> None:
        self._optimizer = optimizer
        self.has_masters = has_masters
        self.params_have_scaled_gradients = False
        self.overflow: tuple[int, LossScaler] | None = None

    @property
    def already_patched(self) -> bool:
        """Whether the optimizer will skip its next step."""
        return self.overflow is not None

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """The fp32 master weights of the parameters that are stored in half, as a list."""
        return [p for p in master_params(self._optimizer) if model_param_of(p) is not p]

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """The model's parameters that are stored in half, with or without master weights, as a list."""
        return [p for p in map(model_param_of, master_params(self._optimizer)) if p.dtype in FORMATS]

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """The model's parameters that are stored in fp32, as a list."""
        params = master_params(self._optimizer)
        return [p for p in params if model_param_of(p) is p and p.dtype not in FORMATS]

    all_fp32_params = all_fp32_from_fp32_params


def equip(optimizer: Any, has_masters: bool) -> None:
    """Give an optimizer its :class:`Stash` and a step that can be skipped.

    The optimizer is a torch optimizer, or a LARC wrapper around a torch optimizer.
    """
    optimizer._amp_stash = Stash(optimizer, has_masters)
    # torch's schedulers expect a bound method that has the attributes of the original step.
    optimizer.step = types.MethodType(_skippable(optimizer.step), optimizer)
    for name, method in (
        ("_amp_lazy_init", lambda self: None),
        ("_prepare_amp_backward", lambda self: None),
        ("_master_params_to_model_params", lambda self: copy_to_model(base_of(self))),
    ):
        setattr(optimizer, name, types.MethodType(method, optimizer))


def _skippable(step: Callable[..., Any]) -> Callable[..., Any]:
    # step is already bound: wraps copies the metadata of its function
    @functools.wraps(getattr(step, "__func__", step))
    def skippable_step(self: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        stash: Stash = self._amp_stash
        if closure is not None:
            if stash.has_masters or stash.overflow is not None:
                raise RuntimeError(_NO_CLOSURES)
            args = (_checked(closure, stash), *args)
        overflow, stash.overflow = stash.overflow, None
        if overflow is not None:
            loss_id, scaler = overflow
            maybe_print(
                f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scaler.loss_scale()}"
            )
            self._opt_called = True  # or torch's schedulers would warn of a missing step
            return None
        handle = _amp_state.handle
        if handle is None:
            return step(*args, **kwargs)
        with handle.suspended():
            value = step(*args, **kwargs)
        handle._clear_cache()
        return value

    return skippable_step


def _checked(closure: Callable[[], Any], stash: Stash) -> Callable[[], Any]:
    """Return a closure that raises RuntimeError if its gradients are not finite.

    The error ends the optimizer step that called the closure, since a step that has begun cannot be skipped. Apex completes
    such a step, after which every weight is NaN.
    """

    def evaluate() -> Any:
        value = closure()
        overflow, stash.overflow = stash.overflow, None
        if overflow is not None:
            raise RuntimeError(
                f"{_NO_CLOSURES} The gradients of this closure overflowed inside the step; the loss scale is "
                f"{overflow[1].loss_scale()} now. Step again, or initialize with a fixed loss_scale."
            )
        return value

    return evaluate


# --- gradients ----------------------------------------------------------------------------------------------


def _params(optimizers: Sequence[Any]) -> list[torch.Tensor]:
    """Return the parameters of all the optimizers, each only once."""
    params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if len(optimizers) > 1:
        params = list({id(parameter): parameter for parameter in params}.values())
    return params


class Scaled:
    """The context manager of ``scale_loss``: returns the scaled loss in fp32, and unscales the gradients on exit.

    On entry, existing unscaled gradients are set aside, so that backward leaves only new gradients. On exit, the new
    gradients are unscaled and the existing ones are added. If a new gradient is not finite, each of the optimizers skips its
    next step. The casts of level ``O1`` are off inside the block. This is a class, since a generator would take longer to
    enter and leave.

    With ``delay_unscale``, the gradients stay scaled and the loss scale unchanged until a later block. With
    ``delay_overflow_check``, only the loss scale stays unchanged. Without optimizers, the loss is scaled and nothing else
    happens.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        optimizers: Sequence[Any],
        scaler: LossScaler,
        loss_id: int = 0,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> None:
        self._loss, self._optimizers = loss, optimizers
        self._scaler, self._loss_id = scaler, loss_id
        self._delay, self._unchecked = delay_unscale, delay_overflow_check

    def __enter__(self) -> torch.Tensor:
        unscaled = [o for o in self._optimizers if not o._amp_stash.params_have_scaled_gradients]
        self._aside = set_aside(_params(unscaled)) if unscaled and not self._delay else []
        self._handle = _amp_state.handle
        if self._handle is not None:
            self._rest = self._handle.suspended()
            self._rest.__enter__()
        return self._loss.float() * self._scaler.loss_scale()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                add_up(self._aside)
            elif self._optimizers:
                self._complete()
        finally:
            if self._handle is not None:
                self._rest.__exit__(None, None, None)
                self._handle._clear_cache()

    def _complete(self) -> None:
        stashes: list[Stash] = [optimizer._amp_stash for optimizer in self._optimizers]
        for stash in stashes:
            stash.params_have_scaled_gradients = self._delay
        if self._delay:
            return
        self._scaler.clear_overflow_state()
        self._scaler.unscale_([g for p in _params(self._optimizers) if (g := p.grad) is not None])
        add_up(self._aside)
        if not self._unchecked and self._scaler.update_scale():
            for stash in stashes:  # one skipped step, however many losses request it
                stash.overflow = stash.overflow or (self._loss_id, self._scaler)
