"""``torch.amp.GradScaler``: access to its state, and detection of active scalers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_check_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_
_unscaled_by_hand: set[tuple[str, torch.dtype]] = set()
"""Device types and formats that torch's kernel has refused."""


def _kind(grads: list[torch.Tensor]) -> tuple[str, torch.dtype]:
    return grads[0].device.type, grads[0].dtype


def check_and_unscale(grads: list[torch.Tensor], flag: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply gradients in place by a factor, and set a flag to 1 if any gradient is not finite.

    Uses torch's kernel if there is one; CUDA has none for bf16 (seen in torch 2.11). There the largest magnitude of
    each gradient, which is NaN if one of its elements is, shows whether all are finite.

    Args:
        grads: At least one, on one device; all of one dtype, except on a CPU.
        flag: 0-dim fp32 on that device.
        factor: 0-dim fp32 on that device.
    """
    if not _unscaled_by_hand or _kind(grads) not in _unscaled_by_hand:
        try:
            _check_and_unscale(grads, flag, factor)
            return
        except NotImplementedError:
            if (
                grads[0].device.type == "cpu"
            ):  # sparse gradients, which the kernel refuses before it writes anything
                raise
            _unscaled_by_hand.add(_kind(grads))
    largest = torch.stack(torch._foreach_norm([grad for grad in grads if grad.numel()] or [flag], math.inf))
    flag.copy_(torch.maximum(flag, (~torch.isfinite(largest).all()).to(flag.dtype)))
    torch._foreach_mul_(grads, factor)


update_scale = torch._amp_update_scale_
"""``(scale, growth_tracker, flag, growth, backoff, interval)``: update a scale in place by its rule."""


def unscale_grads(
    optimizer: torch.optim.Optimizer, inverse: torch.Tensor, flag: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    """Multiply an optimizer's gradients by ``inverse``, as torch's scaler does; returns a flag per device."""
    unscale: Any = torch.amp.GradScaler._unscale_grads_
    return unscale(None, optimizer, inverse, flag, allow_fp16)  # type: ignore[no-any-return]  # it needs no scaler


class OpenGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` with public names for its parts, for a subclass that stores them elsewhere."""

    works: bool
    """Whether it is enabled, on an available device; otherwise it passes everything through."""
    _losses: Any
    """Its ``current`` holds ``scale`` and ``growth_tracker``, None before the first use, and ``allocate(device)``
    creates them."""
    _flags: Any
    """Its ``states`` holds, by the optimizers' ``id``, their stage and their flags by device."""
    _unscaling: Any
    """Its ``unscale(optimizer, inverse, flag, allow_fp16)`` multiplies gradients and returns a flag per device."""
    step_or_skip: Callable[..., Any]
    """``(optimizer, state, *args, **kwargs)``: call the optimizer's step unless a flag of its ``state`` is set."""

    _enabled = property(lambda self: self.works, lambda self, value: setattr(self, "works", value))
    _per_optimizer_states = property(
        lambda self: self._flags.states, lambda self, value: setattr(self._flags, "states", value)
    )
    _scale = property(
        lambda self: self._losses.current.scale,
        lambda self, value: setattr(self._losses.current, "scale", value),
    )
    _growth_tracker = property(
        lambda self: self._losses.current.growth_tracker,
        lambda self, value: setattr(self._losses.current, "growth_tracker", value),
    )

    def check_scaled(self, call: str) -> torch.Tensor:
        """Return the scale; raises torch's error if no loss was ever scaled."""
        return self._check_scale_growth_tracker(call)[0]

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._losses.current.allocate(dev)

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        return self._unscaling.unscale(*args)  # type: ignore[no-any-return]

    def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.step_or_skip(*args, **kwargs)
