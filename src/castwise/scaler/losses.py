"""Named losses: a scale and its counters each.

torch's scaler works on one scale, in attributes that its users know (``_scale``, ``_growth_tracker``). These show the state
of the loss whose window is open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from castwise import _torch
from castwise.scaler.state import ScalePolicy, ScaleState

__all__ = ["LossState", "NamedLosses"]

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
        self.scale = torch.full((), self.first.scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.full((), self.first.growth_tracker, dtype=torch.int32, device=device)
        self.hysteresis_tracker = torch.full(
            (), self.first.hysteresis_tracker, dtype=torch.int32, device=device
        )

    def set(self, state: ScaleState) -> None:
        """Go on with these numbers, in place where there are tensors."""
        self.first = state
        if self.scale is not None and self.growth_tracker is not None and self.hysteresis_tracker is not None:
            self.scale.fill_(state.scale)
            self.growth_tracker.fill_(state.growth_tracker)
            self.hysteresis_tracker.fill_(state.hysteresis_tracker)

    def numbers(self) -> ScaleState:
        """As numbers. Synchronises with the device."""
        if self.scale is None:
            return self.first
        assert self.growth_tracker is not None
        assert self.hysteresis_tracker is not None
        return ScaleState(
            self.scale.item(), int(self.growth_tracker.item()), int(self.hysteresis_tracker.item())
        )


class NamedLosses(_torch.OpenGradScaler):
    """Torch's scaler with a state per loss, made at first use, of which one is in torch's attributes."""

    current: LossState

    def __init__(
        self,
        device: str,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
        limits: ScalePolicy,
    ) -> None:
        self.current = LossState(DEFAULT, ScaleState(init_scale))
        self._losses = {DEFAULT: self.current}  # in order of first use, which Apex's states go by
        self._first_scale = init_scale
        self._limits = limits
        # Of the window that is open: the loss that began it, which is the current one; a flag per loss, once there are two.
        self._base: str | None = None
        self._flags: dict[str, torch.Tensor] = {}
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def allocate(self, device: torch.device) -> None:
        """Make the tensors of the loss in torch's attributes."""
        self.current.allocate(device)

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

    def _put_in_front(self, name: str, device: torch.device | None = None) -> None:
        """Let torch's attributes show another loss."""
        if name != self.current.name:
            self.current = self._loss(name, device)

    def _scale_of(self, name: str) -> torch.Tensor:
        scale = self._loss(name).scale
        assert scale is not None
        return scale

    def scale_tensor(self, name: str | None = None) -> torch.Tensor:
        """The scale of a loss (by default the one that opened the window) as a 0-dim fp32 tensor on the device."""
        return self._scale_of(name or self._base or self.current.name)

    @property
    def opened_by(self) -> str | None:
        """The loss whose scale gradients of this window are at; None while there is none."""
        return self._base

    @opened_by.setter
    def opened_by(self, name: str | None) -> None:
        self._base = name
        if name is not None:
            self._put_in_front(name)

    def is_first(self, name: str) -> bool:
        """Whether no other loss has been scaled in this window, so that gradients need not be kept apart."""
        return self._base is None or (self._base == name and not self._flags)

    # --- saving -------------------------------------------------------------------------------------------

    def _numbers(self, state_of: Callable[[str], ScaleState]) -> dict[str, Any]:
        """What :meth:`state_dict` adds to torch's keys: only what is in use."""
        extras: dict[str, Any] = {}
        if self._limits.hysteresis > 1:
            extras["hysteresis_tracker"] = state_of(DEFAULT).hysteresis_tracker
        losses = {name: state_of(name) for name in self._losses if name != DEFAULT}
        if losses:
            extras["losses"] = {
                name: {
                    "scale": state.scale,
                    "_growth_tracker": state.growth_tracker,
                    "hysteresis_tracker": state.hysteresis_tracker,
                }
                for name, state in losses.items()
            }
        return extras

    def _take(self, state: dict[str, Any]) -> None:
        """Undo :meth:`_numbers`, and take the default loss's numbers; scales are moved to their limits."""

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
