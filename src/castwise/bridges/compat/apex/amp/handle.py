"""Loss scaling around a backward pass, and the handle that ends the casts of level ``O1``."""

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
    """Return a context manager that scales a loss, and unscales and checks the gradients after the backward pass.

    Run the backward pass inside the block::

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    On exit, the gradients of this loss are divided by the loss scale and added to the gradients that existed before. So
    gradients can be accumulated over several losses and batches. If a new gradient is infinite or NaN, the loss scale
    is halved, and the next step of each optimizer does nothing. The casts of ``O1`` are off inside the block, since the
    backward pass needs none.

    Args:
        loss: The loss, of any shape and floating dtype. It is scaled in fp32.
        optimizers: The optimizers whose parameters get gradients from this loss: one optimizer, or a list or tuple.
        loss_id: The index of the loss scale to use, which is below ``num_losses``.
        model: Ignored, as in Apex.
        delay_unscale: Whether to leave the gradients scaled and the loss scale unchanged. A later block without this
            argument then unscales and checks the gradients.
        delay_overflow_check: Whether to unscale the gradients without updating the loss scale and without skipping
            steps.

    Raises:
        RuntimeError: The function was called before ``initialize``.
        IndexError: ``loss_id`` is ``num_losses`` or more.
        LossScaleError: Gradients are still infinite or NaN although the loss scale has fallen to the smallest normal
            fp32 number.
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
    """Return a context manager inside which the casts of level ``O1`` are off.

    On exit they are restored, also after an exception.
    """
    with contextlib.nullcontext() if _amp_state.handle is None else _amp_state.handle.suspended():
        yield


class AmpHandle:
    """Controls the casts of level ``O1``, which last until :meth:`_deactivate` is called.

    :func:`~castwise.compat.apex.amp.init` and ``initialize`` create the handle.

    Args:
        ambient: The casts. The handle does nothing before they are entered or after they have ended.
        dtype: The dtype that "half" means: fp16 or bf16.
        loss_scale: The loss scale that :meth:`scale_loss` uses: ``"dynamic"`` or a number.
        enable_caching: Whether each weight is cast only once in a call of a model that ``initialize`` prepared.
        verbose: Stored without effect.

    Attributes:
        undo: The exit stack that restores patched functions and removes hooks. It is closed when the casts end.
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
        """Whether the casts of level ``O1`` are active in this thread now."""
        return self._ambient.entered and torch.is_autocast_enabled(self.device_type)

    def suspended(self) -> Any:
        """Return a context manager inside which the casts of level ``O1`` are off."""
        return self._ambient.suspended() if self._ambient.entered else contextlib.nullcontext()

    _disable_casts = suspended

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> Any:
        """Return an optimizer wrapper that scales the losses of each step itself, as in Apex's first API.

        Args:
            optimizer: The optimizer.
            num_loss: The number of losses per step, each with its own loss scale.
        """
        from castwise.bridges.compat.apex.amp.opt import OptimWrapper

        self._default_scaler = None
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> Any:
        """Scale a loss for its backward pass, as in Apex's first API. See :func:`scale_loss`.

        Raises:
            RuntimeError: Called after :meth:`wrap_optimizer`. The optimizer that this method returned scales losses itself.
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
            StateError: The calling thread is not the thread that began the casts, or a region of castwise that was entered
                after the casts is still active.
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
        """An empty dict, kept because Apex has this attribute. torch itself caches the cast weights."""
        return {}

    def remove_cache(self, param: torch.Tensor) -> None:
        """Drop the cached half-precision copies of all weights."""
        self._clear_cache()
