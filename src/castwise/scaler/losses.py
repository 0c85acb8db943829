"""The records of named losses: a scale and its counters each.

torch's scaler works on one scale, in attributes that its users know (``_scale``, ``_growth_tracker``). The loss whose
window is open has its record in these attributes, its *slot*; the others wait beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from castwise.scaler.state import ScalePolicy, ScaleState

__all__ = ["LossRecord", "NamedLosses"]

DEFAULT = "loss"
"""Name of the loss that torch's own state dict is about."""


@dataclass
class LossRecord:
    """The device's record of one named loss, all 0-dim: fp32, int32, int32."""

    scale: torch.Tensor
    growth_tracker: torch.Tensor
    hysteresis_tracker: torch.Tensor


class NamedLosses(torch.amp.GradScaler):
    """Torch's scaler with a record per loss, made at first use, of which one occupies torch's attributes."""

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
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._limits = limits
        self._first_scale = init_scale
        self._hysteresis_tracker: torch.Tensor | None = None
        self._init_hysteresis_tracker = 0
        self._slot = DEFAULT
        self._others: dict[str, LossRecord] = {}
        self._saved_others: dict[str, ScaleState] = {}
        self._known: list[str] = []  # all but the default, in order of first use, which Apex's states go by

    def _before_first_use(self, name: str) -> ScaleState:
        if name == DEFAULT:
            return ScaleState(self._init_scale, self._init_growth_tracker, self._init_hysteresis_tracker)
        return self._saved_others.get(name) or ScaleState(self._first_scale)

    def _state_of(self, name: str) -> ScaleState:
        """A loss's state as numbers, without making a record. Synchronises with the device."""
        if name == self._slot and self._scale is not None:
            assert self._growth_tracker is not None
            hysteresis = self._hysteresis_tracker
            return ScaleState(
                self._scale.item(),
                int(self._growth_tracker.item()),
                self._init_hysteresis_tracker if hysteresis is None else int(hysteresis.item()),
            )
        if name in self._others:
            mine = self._others[name]
            return ScaleState(
                mine.scale.item(), int(mine.growth_tracker.item()), int(mine.hysteresis_tracker.item())
            )
        return self._before_first_use(name)

    def _loss(self, name: str, device: torch.device | None = None) -> LossRecord:
        """The record of a loss, made at its first use."""
        if name == self._slot:
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(device or torch.device(self._device))
            assert self._scale is not None
            assert self._growth_tracker is not None
            if self._hysteresis_tracker is None:
                self._hysteresis_tracker = torch.full(
                    (), self._init_hysteresis_tracker, dtype=torch.int32, device=self._scale.device
                )
            return LossRecord(self._scale, self._growth_tracker, self._hysteresis_tracker)
        if name not in self._others:
            where = device or (self._scale.device if self._scale is not None else torch.device(self._device))
            first = self._before_first_use(name)
            self._saved_others.pop(name, None)
            if name != DEFAULT and name not in self._known:
                self._known.append(name)
            self._others[name] = LossRecord(
                torch.full((), first.scale, dtype=torch.float32, device=where),
                torch.full((), first.growth_tracker, dtype=torch.int32, device=where),
                torch.full((), first.hysteresis_tracker, dtype=torch.int32, device=where),
            )
        return self._others[name]

    def _occupy(self, name: str, device: torch.device | None = None) -> None:
        """Put a loss into the attributes that torch's own methods work on; the one there steps aside."""
        if name == self._slot:
            return
        mine = self._loss(name, device)
        if self._scale is not None:
            self._others[self._slot] = self._loss(self._slot)
        del self._others[name]
        self._slot = name
        self._scale, self._growth_tracker = mine.scale, mine.growth_tracker
        self._hysteresis_tracker = mine.hysteresis_tracker

    # --- saving -------------------------------------------------------------------------------------------

    def _numbers(self, state_of: Callable[[str], ScaleState]) -> dict[str, Any]:
        """What :meth:`state_dict` adds to torch's keys: only what is in use."""
        extras: dict[str, Any] = {}
        if self._limits.hysteresis > 1:
            extras["hysteresis_tracker"] = state_of(DEFAULT).hysteresis_tracker
        losses = {name: state_of(name) for name in self._known}
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

    def _take(self, extras: dict[str, Any]) -> None:
        """Undo :meth:`_numbers`, after torch's part has been loaded into the default loss's slot."""
        assert self._slot == DEFAULT
        bounded = self._limits.bounded
        self._init_scale = bounded(self._init_scale)
        if self._scale is not None:
            self._scale.fill_(self._init_scale)
        self._init_hysteresis_tracker = int(extras.get("hysteresis_tracker", 0))
        self._hysteresis_tracker = None
        self._others.clear()
        self._saved_others = {
            name: ScaleState(
                bounded(float(saved["scale"])),
                int(saved["_growth_tracker"]),
                int(saved.get("hysteresis_tracker", 0)),
            )
            for name, saved in extras.get("losses", {}).items()
        }
        self._known = list(self._saved_others)
