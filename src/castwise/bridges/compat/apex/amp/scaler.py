"""A loss scale with Apex's update rule. The scale is a Python number, and is updated after backward passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from castwise.core.scaler import check_and_multiply
from castwise.errors import LossScaleError

__all__ = ["LossScaler"]

_TINY = torch.finfo(torch.float32).tiny
_PATIENCE = 10


class LossScaler:
    """A dynamic or static loss scale.

    A dynamic scale starts at ``min(max_loss_scale, 2**16)``. By default it doubles after 2000 backward passes in a row with
    finite gradients, and halves after a backward pass whose gradients are not finite. A static scale never changes, and no
    step is skipped.

    Args:
        loss_scale: ``"dynamic"``, or the static scale.
        init_scale: The initial value of a dynamic scale.
        scale_factor: The factor by which a dynamic scale grows, and by which it is divided when it shrinks.
        scale_window: The number of backward passes in a row with finite gradients after which a dynamic scale grows.
        min_loss_scale: The smallest value of a dynamic scale. None means fp32's smallest normal number. Apex let the scale
            fall to zero and divided by zero.
        max_loss_scale: The largest value of a dynamic scale.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        ceiling = float("inf") if max_loss_scale is None else max_loss_scale
        self._loss_scale = min(ceiling, init_scale) if self.dynamic else float(loss_scale)
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = ceiling
        self._scale_factor = scale_factor
        self._scale_seq_len = scale_window
        self._unskipped = 0
        self._has_overflow = False
        self._flag: torch.Tensor | None = None
        self._stuck = 0
        self._inverse: tuple[float, torch.Tensor] | None = None

    def loss_scale(self) -> float:
        """Return the scale, a Python number, without waiting for the device."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Forget whether the gradients of the last :meth:`unscale_` were finite."""
        self._has_overflow, self._flag = False, None

    def unscale_(self, grads: Sequence[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place, and record whether all were finite, without waiting for the device.

        The gradients may have any floating dtypes and devices.
        """
        if not grads:
            return
        device = grads[0].device
        kept = self._inverse
        if kept is None or kept[0] != self._loss_scale or kept[1].device != device:
            kept = self._inverse = (self._loss_scale, torch.full((), 1.0 / self._loss_scale, device=device))
        flag = check_and_multiply(grads, kept[1], device)
        self._flag = flag if self._flag is None else torch.maximum(self._flag, flag.to(self._flag.device))

    def update_scale(self) -> bool:
        """Update a dynamic scale according to what :meth:`unscale_` recorded. This synchronises with the device.

        A static scale is not changed, and the device is not waited for.

        Returns:
            Whether the next step must be skipped.

        Raises:
            LossScaleError: No ``min_loss_scale`` was given, the scale has reached fp32's smallest normal number, and
                the gradients were not finite in ten backward passes in a row.
        """
        if self.dynamic and self._flag is not None:
            self._has_overflow = bool(self._flag.item())
        if not (self.dynamic and self._has_overflow):
            self._stuck = 0
            self._unskipped += 1
            if self.dynamic and self._unskipped == self._scale_seq_len:
                self._loss_scale = min(self._max_loss_scale, self._loss_scale * self._scale_factor)
                self._unskipped = 0
            return False
        floor = self._min_loss_scale or _TINY
        self._stuck = self._stuck + 1 if self._loss_scale <= floor else 0
        self._loss_scale = max(floor, self._loss_scale / self._scale_factor)
        self._unskipped = 0
        if self._stuck >= _PATIENCE and not self._min_loss_scale:
            raise LossScaleError(
                f"amp.scale_loss: gradients were not finite {self._stuck} times in a row with the loss scale at {floor:.3g}, "
                "so a smaller scale would not help. Look for NaN or huge values in the data, the weights and the loss, "
                "lower the learning rate, or initialize with cast_model_type=torch.bfloat16 and opt_level='O2'."
            )
        return True
