"""Whether gradients are finite: what was found of each optimizer's, and what optimizers and ranks decide together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.scaler import gradients
from castwise.core.scaler.losses import NamedLosses
from castwise.core.scaler.state import ScalePolicy


class Verdicts(NamedLosses):
    """A scaler's unscaling, and what a session asks of it and tells it about gradients.

    Arguments are as for :class:`~castwise.GradScaler`, whose ``limits`` are what torch's scaler has not.
    """

    admit: Callable[[Optimizer], bool] | None = None
    """Gives late parameters of an optimizer masters; returns whether there were any."""

    def __init__(
        self,
        *scale: Any,
        limits: ScalePolicy,
        reduce: Callable[[torch.Tensor], torch.Tensor | None] | None,
        process_group: Any,
        allow_fp16_grads: bool,
    ) -> None:
        super().__init__(*scale, limits=limits)
        self._reduce = reduce
        self._process_group = process_group
        self._allow_fp16_grads = allow_fp16_grads

    def _agreed(self, flag: torch.Tensor, groups: Sequence[Any] = ()) -> torch.Tensor:
        """The flag as all ranks that act together see it: those of the scaler, without one those of ``groups``."""
        if self._reduce is not None:
            reduced = self._reduce(flag)
            return flag if reduced is None else reduced
        for group in groups if self._process_group is None else (self._process_group,):
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
        return flag

    def unscale_grads(
        self, optimizer: Optimizer, inverse: torch.Tensor, flag: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply an optimizer's gradients by ``inverse``; a flag per device, as all ranks see it."""
        allow_fp16 = allow_fp16 or self._allow_fp16_grads
        if gradients.unscale_plain(optimizer, inverse, flag, allow_fp16):
            flags = {flag.device: flag}
        elif self.admit is not None and self.admit(optimizer):
            return self.unscale_grads(optimizer, inverse, flag, allow_fp16)
        else:
            flags = self._unscale_others(optimizer, inverse, flag, allow_fp16)
        if self._reduce is None and self._process_group is None:
            groups = gradients.mesh_groups(optimizer)
            if not groups:
                return flags
        else:
            groups = []
        # One flag whatever the number of devices, and one also from a rank without gradients: all ranks must make
        # the same calls.
        joint = self._agreed(gradients.largest([*flags.values()], flag.device), groups)
        return {device: joint.to(device) for device in flags or (flag.device,)}

    def _unscale_others(
        self, optimizer: Optimizer, inverse: torch.Tensor, flag: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale where not all gradients are dense, real and on the scale's device."""
        grads = gradients.held(optimizer)
        # torch's scaler takes what is real, and dense or sparse in coordinates, but no bf16 on an accelerator
        if any(
            grad.is_complex()
            or not (_torch.tensors.is_dense(grad) or grad.is_sparse)
            or (grad.dtype is torch.bfloat16 and grad.device.type != "cpu")
            for grad in grads
        ):
            return {flag.device: gradients.check_and_multiply(grads, inverse, flag.device)}
        return super().unscale_grads(optimizer, inverse, flag, allow_fp16)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's gradients have been unscaled in this window."""
        if not self.works:
            return True
        state = self.optimizer_states.get(id(optimizer))
        return state is not None and state["stage"] is OptState.UNSCALED

    def note_unscaled(self, optimizer: Optimizer) -> None:
        """Take an optimizer's gradients, all of them and however they came there, as unscaled; look for infinities."""
        if not self.works:
            return
        one = gradients.number(1.0, self.scale_tensor().device)
        fresh = self.unscale_grads(optimizer, one, torch.zeros_like(one), allow_fp16=True)
        _add_to(self.optimizer_states[id(optimizer)], fresh)

    def _found(self, optimizers: Iterable[Optimizer] | None = None) -> list[torch.Tensor]:
        """What was found in gradients of these optimizers, or of all in this window: a flag per optimizer and device."""
        states = self.optimizer_states
        some = states.values() if optimizers is None else [states[id(optimizer)] for optimizer in optimizers]
        return [flag for state in some for flag in state["found_inf_per_device"].values()]

    def joint_flag(self, optimizers: Iterable[Optimizer]) -> torch.Tensor:
        """Whether a gradient of any of these optimizers is not finite: a 0-dim fp32 tensor of its own."""
        return gradients.largest(self._found(optimizers), self.scale_tensor().device).clone()

    def set_flag(self, optimizers: Iterable[Optimizer], flag: torch.Tensor) -> None:
        """Let these optimizers step or skip by a flag, as other ranks may have changed it."""
        for optimizer in optimizers:
            held = self.optimizer_states[id(optimizer)]["found_inf_per_device"]
            for device in held or (flag.device,):
                held[device] = flag.to(device, copy=True)

    def decide_together(self, optimizers: Sequence[Optimizer]) -> None:
        """Make optimizers whose gradients are unscaled step or skip together."""
        flags = self._found(optimizers) if self.works else ()
        if len(flags) > 1:
            joint = gradients.largest(flags, flags[0].device)
            self.set_flag([optimizer for optimizer in optimizers if self._found((optimizer,))], joint)

    def note_norm(self, optimizers: Iterable[Optimizer], norm: torch.Tensor) -> None:
        """Let the norm of all gradients say whether they are finite, beside what was known of them before."""
        if not self.works:
            return
        flag = (~torch.isfinite(norm.detach())).float()
        for optimizer in optimizers:
            state = self.optimizer_states[id(optimizer)]
            devices = state["found_inf_per_device"] or (flag.device,)
            _add_to(state, {device: flag.to(device, copy=True) for device in devices})

    def add_flags(self, key: int, flags: Mapping[torch.device, torch.Tensor]) -> None:
        """Note what was found in unscaled gradients of an optimizer, by its ``id``, beside what is known of them."""
        _add_to(self.optimizer_states[key], flags)

    def forget(self, optimizer: Optimizer | None = None) -> None:
        """Take an optimizer, or all, as neither unscaled nor stepped in this window."""
        if not self.works:
            return
        if optimizer is None:
            self.optimizer_states.clear()
        else:
            self.optimizer_states.pop(id(optimizer), None)


def _add_to(state: dict[str, Any], flags: Mapping[torch.device, torch.Tensor]) -> None:
    """Have an optimizer's state say that its gradients are unscaled, and what was found in them beside what is known."""
    state["stage"], known = OptState.UNSCALED, state["found_inf_per_device"]
    for device, flag in flags.items():
        known[device] = torch.maximum(known[device], flag) if device in known else flag
