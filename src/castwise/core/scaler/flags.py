"""Record for each optimizer whether its gradients were unscaled since the last update of the scale, and were finite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.scaler import gradients


def _fresh() -> dict[str, Any]:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class Flags:
    """Records which optimizers have unscaled or stepped since the last update of the scale, with finite gradients or not.

    There is one record for each optimizer, in the form of torch's GradScaler. It holds the stage (ready, unscaled or
    stepped) and a flag for each device of the optimizer's gradients. A flag is a 0-dim fp32 tensor that is above zero
    if a gradient on that device is not finite. No method reads gradients or waits for the device.

    Attributes:
        states: The records, by the optimizers' ``id``.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start with new records, and leave the old ones unchanged, since results of earlier steps may hold them."""
        self.states: dict[int, dict[str, Any]] = defaultdict(_fresh)

    def forget(self, optimizer: Optimizer) -> None:
        """Drop an optimizer's record, as if it had neither unscaled nor stepped."""
        self.states.pop(id(optimizer), None)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients have been unscaled and the optimizer has not stepped since then."""
        state = self.states.get(id(optimizer))
        return state is not None and state["stage"] is OptState.UNSCALED

    def of(self, optimizers: Iterable[Optimizer] | None = None) -> list[torch.Tensor]:
        """Return the flags for non-finite gradients of these optimizers, or of all, one for each optimizer and device."""
        states = self.states
        some = states.values() if optimizers is None else [states[id(optimizer)] for optimizer in optimizers]
        return [flag for state in some for flag in state["found_inf_per_device"].values()]

    def joint(self, optimizers: Iterable[Optimizer], device: torch.device) -> torch.Tensor:
        """Return a new flag on ``device`` that is above zero if a gradient of any of these optimizers is not finite."""
        return gradients.largest(self.of(optimizers), device).clone()

    def set(self, optimizers: Iterable[Optimizer], flag: torch.Tensor) -> None:
        """Replace the flags for non-finite gradients of these optimizers by copies of one flag.

        For example, that may be the flag on which all ranks agreed.
        """
        for optimizer in optimizers:
            held = self.states[id(optimizer)]["found_inf_per_device"]
            for device in held or (flag.device,):
                held[device] = flag.to(device, copy=True)

    def join(self, optimizers: Sequence[Optimizer]) -> None:
        """Make these optimizers skip their steps together if a gradient of any of them is not finite."""
        flags = self.of(optimizers)
        if len(flags) > 1:
            joint = gradients.largest(flags, flags[0].device)
            self.set([optimizer for optimizer in optimizers if self.of((optimizer,))], joint)

    def note_norm(self, optimizers: Iterable[Optimizer], norm: torch.Tensor) -> None:
        """Record that gradients of these optimizers are not finite if the norm of all their gradients is not finite."""
        flag = (~torch.isfinite(norm.detach())).float()
        for optimizer in optimizers:
            devices = self.states[id(optimizer)]["found_inf_per_device"] or (flag.device,)
            self.add(id(optimizer), {device: flag.to(device, copy=True) for device in devices})

    def add(self, key: int, flags: Mapping[torch.device, torch.Tensor]) -> None:
        """Record that an optimizer's gradients are unscaled, and whether they are finite on each device.

        Args:
            key: The ``id`` of the optimizer.
            flags: For each device, a 0-dim fp32 tensor that is above zero if a gradient there is not finite.
        """
        state = self.states[key]
        state["stage"], known = OptState.UNSCALED, state["found_inf_per_device"]
        for device, flag in flags.items():
            known[device] = torch.maximum(known[device], flag) if device in known else flag


_torch.tensors.never_trace(Flags.join)
