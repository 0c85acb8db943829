"""The loss scale with Apex's update rule: updated at backward passes, with a number on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from castwise.core.scaler import check_and_multiply
from castwise.errors import LossScaleError

__all__ = ["LossScaler"]

_TINY = torch.finfo(torch.float32).tiny
_PATIENCE = 10


class LossScaler:
    """One loss scale.

    A dynamic scale starts at ``min(max_loss_scale, 2**16)``, doubles after 2000 backward passes with finite gradients
    and halves after one without. A static one never changes and never skips a step.

    Args:
        loss_scale: ``"dynamic"``, or the static scale.
        init_scale: First dynamic scale.
        scale_factor: Growth factor; its inverse is the backoff factor.
        scale_window: Backward passes with finite gradients before the scale grows.
        min_loss_scale: Floor of a dynamic scale. Without a floor the scale stops at fp32's smallest normal number;
            Apex let it fall to zero and divided by it.
        max_loss_scale: Ceiling of a dynamic scale.
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
        """The scale, a number that the host knows without waiting."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Clear the result of :meth:`unscale_`."""
        self._has_overflow, self._flag = False, None

    def unscale_(self, grads: Sequence[torch.Tensor]) -> None:
        """Divide gradients, of any floating dtypes and devices, by the scale, in place; record whether all were finite.

        Does not wait for the device.
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
        """Update the scale by the recorded result. Synchronises with the device if the scale is dynamic.

        Returns:
            Whether the next step must be skipped.

        Raises:
            LossScaleError: There is no floor, the scale has reached fp32's smallest number, and gradients still are
                not finite.
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
