"""The state of each optimizer's gradients between two updates of the scale: a stage and non-finite flags."""

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
    """Which optimizers have unscaled or stepped since the last update, and whether their gradients were finite.

    There is one record per optimizer, in torch's form: its stage, and a flag (0-dim fp32) for each device of its
    gradients, above zero if a gradient there is not finite. Nothing here reads gradients or waits for the device.

    Attributes:
        states: The records, by the optimizers' ``id``.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start with new records; existing results may still hold the old ones."""
        self.states: dict[int, dict[str, Any]] = defaultdict(_fresh)

    def forget(self, optimizer: Optimizer) -> None:
        """Drop an optimizer's record, as if it had neither unscaled nor stepped."""
        self.states.pop(id(optimizer), None)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's gradients are unscaled and it has not stepped since."""
        state = self.states.get(id(optimizer))
        return state is not None and state["stage"] is OptState.UNSCALED

    def of(self, optimizers: Iterable[Optimizer] | None = None) -> list[torch.Tensor]:
        """The flags of these optimizers, or of all: one for each optimizer and device."""
        states = self.states
        some = states.values() if optimizers is None else [states[id(optimizer)] for optimizer in optimizers]
        return [flag for state in some for flag in state["found_inf_per_device"].values()]

    def joint(self, optimizers: Iterable[Optimizer], device: torch.device) -> torch.Tensor:
        """Whether a gradient of any of these optimizers is not finite: one new flag, on ``device``."""
        return gradients.largest(self.of(optimizers), device).clone()

    def set(self, optimizers: Iterable[Optimizer], flag: torch.Tensor) -> None:
        """Replace the flags of these optimizers by one flag, such as the one that all ranks agreed on."""
        for optimizer in optimizers:
            held = self.states[id(optimizer)]["found_inf_per_device"]
            for device in held or (flag.device,):
                held[device] = flag.to(device, copy=True)

    def join(self, optimizers: Sequence[Optimizer]) -> None:
        """Make optimizers whose gradients are unscaled step or skip together."""
        flags = self.of(optimizers)
        if len(flags) > 1:
            joint = gradients.largest(flags, flags[0].device)
            self.set([optimizer for optimizer in optimizers if self.of((optimizer,))], joint)

    def note_norm(self, optimizers: Iterable[Optimizer], norm: torch.Tensor) -> None:
        """Flag these optimizers if the norm of all their gradients is not finite."""
        flag = (~torch.isfinite(norm.detach())).float()
        for optimizer in optimizers:
            devices = self.states[id(optimizer)]["found_inf_per_device"] or (flag.device,)
            self.add(id(optimizer), {device: flag.to(device, copy=True) for device in devices})

    def add(self, key: int, flags: Mapping[torch.device, torch.Tensor]) -> None:
        """Record that an optimizer's gradients are unscaled, and add flags to its record; the optimizer is given by ``id``."""
        state = self.states[key]
        state["stage"], known = OptState.UNSCALED, state["found_inf_per_device"]
        for device, flag in flags.items():
            known[device] = torch.maximum(known[device], flag) if device in known else flag


_torch.tensors.never_trace(Flags.join)
