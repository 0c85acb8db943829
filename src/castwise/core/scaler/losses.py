"""Named losses: a scale and its counters each.

torch's scaler works on one scale, in attributes that its users know (``_scale``, ``_growth_tracker``). These show the state
of the loss whose window is open.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import torch

from castwise.core import _torch
from castwise.core.scaler.state import ScalePolicy, ScaleState

DEFAULT = "loss"
"""Name of the loss that torch's own state dict is about."""


@dataclass(eq=False)
class LossState:
    """The scale of one named loss on the device, and its counters: 0-dim fp32, int32, int32.

    Attributes:
        name: Of the loss.
        first: What they begin with.
        scale: None before the first use, as the counters.
        growth_tracker: As in :class:`ScaleState`.
        hysteresis_tracker: As in :class:`ScaleState`.
    """

    name: str
    first: ScaleState
    scale: torch.Tensor | None = None
    growth_tracker: torch.Tensor | None = None
    hysteresis_tracker: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> None:
        """Make the tensors."""
        kinds = (torch.float32, torch.int32, torch.int32)
        self.scale, self.growth_tracker, self.hysteresis_tracker = _torch.tensors.outside_transforms(
            lambda: [
                torch.full((), number, dtype=dtype, device=device)
                for number, dtype in zip(astuple(self.first), kinds, strict=True)
            ]
        )

    def set(self, state: ScaleState) -> None:
        """Go on with these numbers, in place where there are tensors."""
        self.first = state
        for tensor, number in zip(self._tensors(), astuple(state), strict=False):
            tensor.fill_(number)

    def numbers(self) -> ScaleState:
        """As numbers. Synchronises with the device."""
        numbers: list[Any] = [tensor.item() for tensor in self._tensors()]
        return ScaleState(*numbers) if numbers else self.first

    def _tensors(self) -> list[torch.Tensor]:
        tensors = self.scale, self.growth_tracker, self.hysteresis_tracker
        return [tensor for tensor in tensors if tensor is not None]


class NamedLosses(_torch.grad_scaler.OpenGradScaler):
    """Torch's scaler with a state per loss, made at first use, of which one is in torch's attributes."""

    current: LossState

    def __init__(self, device: str, init_scale: float, *others: Any, limits: ScalePolicy) -> None:
        self.current = LossState(DEFAULT, ScaleState(init_scale))
        self._losses = {DEFAULT: self.current}  # in order of first use, which Apex's states go by
        self._first_scale = init_scale
        self._limits = limits
        self.opened_by: str | None = None
        """The loss at whose scale the gradients of this window are, which is the current one; None while there is none."""
        self._flags: dict[str, torch.Tensor] = {}
        """Of the losses of this window, once there are two."""
        super().__init__(device, init_scale, *others)
        self.scales = self.works
        """Whether losses are multiplied."""

    def is_enabled(self) -> bool:
        """Whether losses are multiplied."""
        return self.scales

    def _state_of(self, name: str) -> ScaleState:
        """A loss's state as numbers, without making one. Synchronises with the device."""
        loss = self._losses.get(name)
        return ScaleState(self._first_scale) if loss is None else loss.numbers()

    def _loss(self, name: str, device: torch.device | None = None) -> LossState:
        """The state of a loss, made at its first use."""
        loss = self._losses.get(name)
        if loss is None:
            loss = self._losses[name] = LossState(name, ScaleState(self._first_scale))
        if loss.scale is None:
            now = self.current.scale
            loss.allocate(device or (torch.device(self.device_type) if now is None else now.device))
        return loss

    def open_for(self, name: str, device: torch.device | None = None) -> None:
        """Begin a window at the scale of a loss, and let torch's attributes show this one."""
        if name != self.current.name:
            self.current = self._loss(name, device)
        self.opened_by = name

    def _scale_of(self, name: str) -> torch.Tensor:
        scale = self._loss(name).scale
        assert scale is not None
        return scale

    def scale_tensor(self, name: str | None = None) -> torch.Tensor:
        """The scale of a loss (by default the one that opened the window) as a 0-dim fp32 tensor on the device."""
        return self._scale_of(name or self.current.name)

    def scale_for_grad(self, name: str | None) -> torch.Tensor:
        """The scale of a loss, or the smallest of all: 0-dim fp32, on the device of the current one."""
        home = self.scale_tensor().device
        if name is not None:
            return self.scale_tensor(name).to(home)
        scales = [self.scale_tensor(each).to(home) for each in self._losses]
        return scales[0] if len(scales) == 1 else torch.stack(scales).amin(0)

    def is_first(self, name: str) -> bool:
        """Whether no other loss has been scaled in this window, so that gradients need not be kept apart."""
        return self.opened_by is None or (self.opened_by == name and not self._flags)

    def _take(self, state: dict[str, Any]) -> None:
        """Take the numbers of all losses from a saved state; scales are moved to their limits."""

        def saved(entry: dict[str, Any]) -> ScaleState:
            return ScaleState(
                self._limits.bounded(float(entry["scale"])),
                int(entry["_growth_tracker"]),
                int(entry.get("hysteresis_tracker", 0)),
            )

        first = self._losses[DEFAULT]
        first.set(saved(state))
        others = state.get("losses", {}).items()
        self.current = first
        self._losses = {DEFAULT: first, **{name: LossState(name, saved(entry)) for name, entry in others}}
