"""Unscaling: multiply an optimizer's gradients by a factor, and report whether they are finite on all ranks that act together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.scaler import gradients

_Flags = dict[torch.device, torch.Tensor]


def unscale_others(
    optimizer: Optimizer, inverse: torch.Tensor, flag: torch.Tensor, allow_fp16: bool
) -> _Flags:
    """Unscale if not all gradients are dense, real and on the scale's device."""
    grads = gradients.held(optimizer)
    # torch's scaler takes real gradients that are dense or COO-sparse, but no bf16 on an accelerator
    if any(
        grad.is_complex()
        or not (_torch.tensors.is_dense(grad) or grad.is_sparse)
        or (grad.dtype is torch.bfloat16 and grad.device.type != "cpu")
        for grad in grads
    ):
        return {flag.device: gradients.check_and_multiply(grads, inverse, flag.device)}
    return _torch.grad_scaler.unscale_grads(optimizer, inverse, flag, allow_fp16)


class Unscaling:
    """Multiplies all gradients of an optimizer by a factor and returns whether one was not finite on any rank.

    Args:
        reduce: As in :class:`castwise.GradScaler`, like the next two.
        process_group: A process group, given instead of ``reduce``.
        allow_fp16: Unscale fp16 gradients too.
        others: Unscales gradients that are not all dense, real and on the scale's device.
    """

    admit: Callable[[Optimizer], bool] | None = None
    """Gives masters to parameters that joined an optimizer late; returns whether there were any."""

    def __init__(
        self,
        reduce: Callable[[torch.Tensor], torch.Tensor | None] | None,
        process_group: Any,
        allow_fp16: bool,
        others: Callable[[Optimizer, torch.Tensor, torch.Tensor, bool], _Flags] = unscale_others,
    ) -> None:
        self._reduce = reduce
        self._process_group = process_group
        self._allow_fp16 = allow_fp16
        self._others = others

    def outside_session(self) -> Unscaling:
        """A copy for a scaler that is copied or saved: without its session and that session's ranks."""
        other = copy.copy(self)
        if self.admit is not None:
            other.admit = other._reduce = None
        return other

    def agreed(self, flag: torch.Tensor, groups: Sequence[Any] = ()) -> torch.Tensor:
        """The flag reduced over all ranks that act together: the scaler's ranks, or else those of ``groups``."""
        if self._reduce is not None:
            reduced = self._reduce(flag)
            return flag if reduced is None else reduced
        for group in groups if self._process_group is None else (self._process_group,):
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
        return flag

    def unscale(
        self, optimizer: Optimizer, inverse: torch.Tensor, flag: torch.Tensor, allow_fp16: bool
    ) -> _Flags:
        """Multiply an optimizer's gradients by ``inverse``; return a flag per device, reduced over ranks.

        ``flag`` is zero and may be among the returned flags: 0-dim fp32 on the scale's device.
        """
        allow_fp16 = allow_fp16 or self._allow_fp16
        if gradients.unscale_plain(optimizer, inverse, flag, allow_fp16):
            flags = {flag.device: flag}
        elif self.admit is not None and self.admit(optimizer):
            return self.unscale(optimizer, inverse, flag, allow_fp16)
        else:
            flags = self._others(optimizer, inverse, flag, allow_fp16)
        alone = self._reduce is None and self._process_group is None
        groups = gradients.mesh_groups(optimizer) if alone else []
        if alone and not groups:
            return flags
        # One flag for any number of devices, and one from a rank without gradients too: all ranks must make
        # the same calls.
        joint = self.agreed(gradients.largest([*flags.values()], flag.device), groups)
        return {device: joint.to(device) for device in flags or (flag.device,)}
