"""Private API of ``torch.amp.GradScaler``: its kernels, and a base class that gives access to its state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_check_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_
_unscaled_by_hand: set[tuple[str, torch.dtype]] = set()
"""Device types and dtypes of gradients that torch's kernel for unscaling has refused."""


def _kind(grads: list[torch.Tensor]) -> tuple[str, torch.dtype]:
    return grads[0].device.type, grads[0].dtype


def check_and_unscale(grads: list[torch.Tensor], flag: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply gradients in place by a factor, and set a flag to 1 if any gradient is not finite.

    torch's kernel is used if there is one. CUDA has none for bf16 (seen in torch 2.11). In that case the
    largest magnitude of each gradient is checked, which is NaN if any element is NaN.

    Args:
        grads: At least one gradient. All must be on one device and, except on a CPU, of one dtype.
        flag: A 0-dim fp32 tensor on the same device.
        factor: A 0-dim fp32 tensor on the same device.
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
"""torch's kernel that updates a loss scale in place, by whether gradients overflowed.

Its arguments are ``(scale, growth_tracker, flag, growth, backoff, interval)``."""


def unscale_grads(
    optimizer: torch.optim.Optimizer, inverse: torch.Tensor, flag: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    """Multiply an optimizer's gradients by ``inverse``, as torch's GradScaler does when it unscales.

    Returns:
        For each device, a tensor that is not 0 if a gradient on the device is not finite.
    """
    unscale: Any = torch.amp.GradScaler._unscale_grads_
    return unscale(None, optimizer, inverse, flag, allow_fp16)  # type: ignore[no-any-return]  # it needs no scaler


class OpenGradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` whose state a subclass keeps in the attributes below, instead of where torch keeps it."""

    works: bool
    """Whether the scaler is enabled and its device available. Otherwise it scales nothing and skips no step."""
    _losses: Any
    """An object whose attribute ``current`` holds the tensors ``scale`` and ``growth_tracker``.

    Both are None before the first use. ``current.allocate(device)`` creates them."""
    _flags: Any
    """An object whose attribute ``states`` maps an optimizer's ``id`` to its stage and, by device, its non-finite flags."""
    _unscaling: Any
    """An object whose method ``unscale(optimizer, inverse, flag, allow_fp16)`` does what :func:`unscale_grads` does."""
    step_or_skip: Callable[..., Any]
    """A function that calls an optimizer's step, unless a non-finite flag in the optimizer's ``state`` is set.

    Its arguments are ``(optimizer, state, *args, **kwargs)``."""

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
        """Return the loss scale as a tensor, or raise torch's error if no loss was ever scaled.

        Args:
            call: The name of the method that the error message mentions.
        """
        return self._check_scale_growth_tracker(call)[0]

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._losses.current.allocate(dev)

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        return self._unscaling.unscale(*args)  # type: ignore[no-any-return]

    def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.step_or_skip(*args, **kwargs)
