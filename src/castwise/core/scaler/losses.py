"""Keep a loss scale and its counters for each named loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch

from castwise.core import _torch
from castwise.core.scaler.state import ScalePolicy, ScaleState, update_on_device

DEFAULT = "loss"
"""The name of the loss whose scale is stored in a state dict under the keys of torch's GradScaler."""


@dataclass(eq=False)
class LossState:
    """The scale of one named loss and its counters, as tensors on the device.

    Attributes:
        name: Name of the loss.
        first: The values with which the tensors are created.
        scale: The scale, 0-dim fp32; None before the first use.
        growth_tracker: As in :class:`ScaleState`, 0-dim int32; None before the first use.
        hysteresis_tracker: As in :class:`ScaleState`, 0-dim int32; None before the first use.
    """

    name: str
    first: ScaleState
    scale: torch.Tensor | None = None
    growth_tracker: torch.Tensor | None = None
    hysteresis_tracker: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> None:
        """Create the tensors on a device, with the values of ``first``."""
        kinds = (torch.float32, torch.int32, torch.int32)
        self.scale, self.growth_tracker, self.hysteresis_tracker = _torch.tensors.outside_transforms(
            lambda: [
                torch.full((), number, dtype=dtype, device=device)
                for number, dtype in zip(astuple(self.first), kinds, strict=True)
            ]
        )

    def set(self, state: ScaleState) -> None:
        """Set the scale and counters to these values, in place if the tensors exist."""
        self.first = state
        for tensor, number in zip(self._tensors(), astuple(state), strict=False):
            tensor.fill_(number)

    def numbers(self) -> ScaleState:
        """Return the scale and counters as Python numbers. Synchronises with the device."""
        numbers: list[Any] = [tensor.item() for tensor in self._tensors()]
        return ScaleState(*numbers) if numbers else self.first

    def _tensors(self) -> list[torch.Tensor]:
        tensors = self.scale, self.growth_tracker, self.hysteresis_tracker
        return [tensor for tensor in tensors if tensor is not None]


class Losses:
    """Holds the scales of all named losses, and knows which loss set the scale of the present gradients.

    The scale of a loss is created when the loss is first used.

    Attributes:
        by_name: All losses by name, in the order of first use, as Apex's states are ordered.
        current: The loss by whose scale the present gradients are multiplied: the first one that was scaled since the
            last update, or before it if none was.
        opened_by: The name of the first loss that was scaled since the last update, or None if none was.
        flags: For each loss that was scaled since the last update, a tensor that is above zero if its gradients were not
            finite. Empty as long as there is only one loss.

    Args:
        init_scale: First scale of each loss.
        device_type: Device of a scale that is read before any loss was scaled.
    """

    def __init__(self, init_scale: float, device_type: str) -> None:
        self._first = ScaleState(init_scale)
        self._device_type = device_type
        self.current = LossState(DEFAULT, self._first)
        self.by_name = {DEFAULT: self.current}
        self.opened_by: str | None = None
        self.flags: dict[str, torch.Tensor] = {}

    def state_of(self, name: str) -> ScaleState:
        """Return the scale of a loss and its counters as numbers. Synchronises with the device.

        For a loss that was not used yet, these are the first values, and no tensors are created.
        """
        loss = self.by_name.get(name)
        return self._first if loss is None else loss.numbers()

    def get(self, name: str, device: torch.device | None = None) -> LossState:
        """Return the scale of a loss and its counters as tensors, which are created at the first use."""
        loss = self.by_name.get(name)
        if loss is None:
            loss = self.by_name[name] = LossState(name, self._first)
        if loss.scale is None:
            now = self.current.scale
            loss.allocate(device or (torch.device(self._device_type) if now is None else now.device))
        return loss

    def scale_tensor(self, name: str | None = None) -> torch.Tensor:
        """Return the scale of a loss as a 0-dim fp32 tensor on the device. Without a name, the loss is :attr:`current`."""
        scale = self.get(name or self.current.name).scale
        assert scale is not None
        return scale

    def scale_or_smallest(self, name: str | None) -> torch.Tensor:
        """Return the scale of a loss, or for None the smallest of all scales.

        The result is a 0-dim fp32 tensor on the device of the scale of :attr:`current`.
        """
        home = self.scale_tensor().device
        if name is not None:
            return self.scale_tensor(name).to(home)
        scales = [self.scale_tensor(each).to(home) for each in self.by_name]
        return scales[0] if len(scales) == 1 else torch.stack(scales).amin(0)

    def open(self, name: str, device: torch.device | None = None) -> None:
        """Make a loss the current one, because it is the first that is scaled since the last update."""
        if name != self.current.name:
            self.current = self.get(name, device)
        self.opened_by = name

    def is_first(self, name: str) -> bool:
        """Whether no other loss has been scaled since the last update, so that gradients need not be kept apart."""
        return self.opened_by is None or (self.opened_by == name and not self.flags)

    def move(self, flags: Mapping[str, torch.Tensor], policy: ScalePolicy) -> None:
        """Update the scales of losses: grow or keep them if their gradients were finite, and shrink them otherwise.

        ``flags`` holds for each loss a tensor that is above zero if a gradient was not finite.
        """
        for name, flag in flags.items():
            loss, scale = self.get(name), self.scale_tensor(name)
            assert loss.growth_tracker is not None
            flag = flag.to(scale.device, non_blocking=True)
            update_on_device(scale, loss.growth_tracker, loss.hysteresis_tracker, flag, policy)

    def hold_back(self, flags: Mapping[str, torch.Tensor]) -> None:
        """Keep the next :meth:`move` from counting losses with finite gradients towards the growth of their scales.

        This subtracts one from the counters of these losses, which :meth:`move` then adds again.
        """
        for name, flag in flags.items():
            tracker = self.get(name, flag.device).growth_tracker
            assert tracker is not None
            tracker.sub_((flag.to(tracker.device) == 0).to(tracker.dtype))

    def load(self, state: Mapping[str, Any], limits: ScalePolicy) -> None:
        """Load the scales of a saved state, clamped to floor and ceiling, and forget which losses were scaled."""

        def saved(entry: Mapping[str, Any]) -> ScaleState:
            return ScaleState(
                limits.bounded(float(entry["scale"])),
                int(entry["_growth_tracker"]),
                int(entry.get("hysteresis_tracker", 0)),
            )

        first = self.by_name[DEFAULT]
        first.set(saved(state))
        others = state.get("losses", {}).items()
        self.current = first
        self.by_name = {DEFAULT: first, **{name: LossState(name, saved(entry)) for name, entry in others}}
        self.opened_by, self.flags = None, {}

    def without_tensors(self) -> Losses:
        """Return a copy for a scaler that is copied or saved, in which the scales are numbers instead of tensors.

        Synchronises with the device.
        """
        copy = Losses(self._first.scale, self._device_type)
        copy.by_name = {name: LossState(name, loss.numbers()) for name, loss in self.by_name.items()}
        copy.current = copy.by_name[DEFAULT]
        return copy
