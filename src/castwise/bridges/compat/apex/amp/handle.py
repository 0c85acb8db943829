"""Loss scaling around a backward pass, and the handle of O1's casts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from castwise.bridges.compat.apex.amp import stash
from castwise.bridges.compat.apex.amp._amp_state import _amp_state
from castwise.bridges.compat.apex.amp.scaler import LossScaler
from castwise.core.casting import AmbientAutocast
from castwise.errors import StateError

__all__ = ["AmpHandle", "disable_casts", "scale_loss"]


def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[torch.Tensor]:
    """Scale a loss for its backward pass, and unscale and check the gradients after it.

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    Earlier gradients are set aside and then added, so that losses and micro-batches accumulate. If a new gradient is
    not finite, the scale is halved and the next step of each optimizer does nothing. The casts of O1 are off inside the
    block, since backward needs none.

    Args:
        loss: The loss, of any shape and floating dtype; it is scaled in fp32.
        optimizers: Every optimizer whose parameters get gradients from this loss: one, or a list or tuple.
        loss_id: Index of the loss scale to use, below ``num_losses``.
        model: Ignored, as in Apex.
        delay_unscale: Leave gradients scaled and the scale unchanged, for a later pass to complete.
        delay_overflow_check: Leave the scale unchanged.

    Raises:
        RuntimeError: Called before ``initialize``.
        IndexError: ``loss_id`` is ``num_losses`` or more.
        LossScaleError: Gradients overflow although the scale is at fp32's smallest number.
    """
    properties = getattr(_amp_state, "opt_properties", None)
    if properties is None:
        raise RuntimeError(
            "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  model, optimizer = "
            "amp.initialize(model, optimizer, opt_level=...) must be called before `with amp.scale_loss`."
        )
    if not properties.enabled:
        return contextlib.nullcontext(loss)
    scaler = _amp_state.loss_scalers[loss_id]
    if not properties.master_weights and not scaler.dynamic and scaler.loss_scale() == 1.0:
        return stash.Scaled(loss, [], scaler)
    optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in optimizers:
        if not hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                f"amp.scale_loss(loss, {type(optimizer).__name__}): this optimizer did not come from amp.initialize; "
                "pass it to amp.initialize(model, optimizer) first"
            )
    return stash.Scaled(loss, optimizers, scaler, loss_id, delay_unscale, delay_overflow_check)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Turn the casts of O1 off inside the block; restores them also after an exception."""
    with contextlib.nullcontext() if _amp_state.handle is None else _amp_state.handle.suspended():
        yield


class AmpHandle:
    """The casts of O1, from :func:`~castwise.compat.apex.amp.init` or ``initialize`` until :meth:`_deactivate`.

    Args:
        ambient: The casts; the handle does nothing before they are entered or after they have ended.
        dtype: The dtype that half stands for.
        loss_scale: For losses scaled by :meth:`scale_loss`.
        enable_caching: Whether weights are cast once in each call of an initialised model.
        verbose: Stored without effect.

    Attributes:
        undo: Called when the casts end.
    """

    def __init__(
        self,
        ambient: AmbientAutocast,
        dtype: torch.dtype,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
    ) -> None:
        self.device_type = ambient.device_type
        self.dtype = dtype
        self._ambient = ambient
        self.has_cache = enable_caching
        self.verbose = verbose
        self._default_scaler: LossScaler | None = LossScaler(loss_scale)
        self.undo = contextlib.ExitStack()

    def is_active(self) -> bool:
        """Whether operators are cast on this thread now."""
        return self._ambient.entered and torch.is_autocast_enabled(self.device_type)

    def suspended(self) -> Any:
        """A block without casts."""
        return self._ambient.suspended() if self._ambient.entered else contextlib.nullcontext()

    _disable_casts = suspended

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Wrap an optimizer so that it scales ``num_loss`` losses per step itself, as in Apex's first API."""
        from castwise.bridges.compat.apex.amp.opt import OptimWrapper

        self._default_scaler = None
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Any:
        """Scale a loss, as in Apex's first API.

        Raises:
            RuntimeError: Called after :meth:`wrap_optimizer`, whose optimizer scales losses itself.
        """
        if not self.is_active():
            return contextlib.nullcontext(loss)
        if self._default_scaler is None:
            raise RuntimeError(
                "After calling `handle.wrap_optimizer()`, you must explicitly use `optimizer.scale_loss(loss)`."
            )
        if not hasattr(optimizer, "_amp_stash"):
            stash.equip(optimizer, has_masters=False)
        return stash.Scaled(loss, [optimizer], self._default_scaler)

    def _clear_cache(self) -> None:
        self._ambient.clear_cache()

    def _deactivate(self) -> None:
        """End the casts, and restore every patched function.

        Raises:
            StateError: Called on another thread than the one that began them, or inside a region that was entered after
                them.
        """
        try:
            self._ambient.leave()
        except StateError as error:
            raise StateError(f"handle._deactivate(): {error}") from None
        self.undo.close()
        if _amp_state.handle is self:
            _amp_state.handle = None

    deactivate = _deactivate

    @property
    def cache(self) -> dict[Any, Any]:
        """Always empty: torch holds the copies."""
        return {}

    def remove_cache(self, param: torch.Tensor) -> None:
        """Drop the low-precision copies of weights."""
        self._clear_cache()
