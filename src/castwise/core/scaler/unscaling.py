"""Unscale an optimizer's gradients, and report whether they are finite on all ranks that must agree."""

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
    """Unscale an optimizer's gradients if some are sparse, complex or on another device than the loss scale.

    The arguments and the result are those of :meth:`Unscaling.unscale`. But the result says only whether gradients are
    finite on this rank.
    """
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
        reduce: Makes ranks agree on a flag, as in :class:`castwise.GradScaler`.
        process_group: A process group to give instead of ``reduce``, as in :class:`castwise.GradScaler`.
        allow_fp16: Whether to unscale fp16 gradients too.
        others: A function that unscales gradients of which some are sparse, complex or on another device than the loss
            scale.
    """

    admit: Callable[[Optimizer], bool] | None = None
    """A function that gives fp32 masters to parameters that were added to an optimizer after it was prepared.

    It returns whether there were any.
    """

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
        """Return a copy for a scaler that is copied or saved, without references to the Amp it belongs to and its ranks."""
        other = copy.copy(self)
        if self.admit is not None:
            other.admit = other._reduce = None
        return other

    def agreed(self, flag: torch.Tensor, groups: Sequence[Any] = ()) -> torch.Tensor:
        """Return the maximum of a flag over ranks, so that all ranks know of a non-finite gradient on any of them.

        The flag is a 0-dim fp32 tensor that is above zero if a gradient is not finite. Ranks that were given to the class
        take part, or if none were given, the ranks of ``groups``.
        """
        if self._reduce is not None:
            reduced = self._reduce(flag)
            return flag if reduced is None else reduced
        for group in groups if self._process_group is None else (self._process_group,):
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
        return flag

    def unscale(
        self, optimizer: Optimizer, inverse: torch.Tensor, flag: torch.Tensor, allow_fp16: bool
    ) -> _Flags:
        """Multiply an optimizer's gradients by ``inverse``, and return whether one was not finite.

        Args:
            optimizer: The optimizer.
            inverse: One over the loss scale, a 0-dim fp32 tensor.
            flag: A 0-dim fp32 zero on the device of the loss scale, which may be written and returned.
            allow_fp16: Whether to unscale fp16 gradients too.

        Returns:
            A flag by its device, a 0-dim fp32 tensor that is above zero if a gradient was not finite on any rank.
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
        if alone and not groups and len(flags) < 2:
            return flags
        # All ranks must make the same collective calls, so each sends exactly one flag, whether its gradients are on
        # several devices or it has none.
        joint = self.agreed(gradients.largest([*flags.values()], flag.device), groups)
        # Return one flag even for several devices: torch's scaler adds flags, and fused kernels detect only exactly 1.
        return {flag.device: joint}
