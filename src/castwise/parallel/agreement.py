"""The one place where ranks agree: on non-finite gradients and on global norms.

Each is one all-reduce of one number over all ranks of the session (``Amp(group=...)``, by default all), and where
gradients are clipped both travel in the same message. No group of a mesh is used: a parameter's contribution to the
norm is divided by the number of ranks that hold the same piece of it, so that the plain sum over all ranks counts each
parameter once, whatever mesh it lies on.

Gradients that DistributedDataParallel has averaged over all ranks agree already and nothing is sent for them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from castwise import _torch, masters
from castwise.errors import StateError
from castwise.parallel.pieces import Pieces, is_dtensor

__all__ = ["Agreement", "apart", "clip_by_norm", "local_grad"]


_apart = False


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Sessions made inside act for this rank alone, whatever group it is in: for measuring and looking."""
    global _apart
    former, _apart = _apart, True
    try:
        yield
    finally:
        _apart = former


class Agreement:
    """What the ranks of one session agree on.

    Args:
        group: The ranks that act together; None for all.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self._apart = _apart
        self.pieces = Pieces()
        self._averaged: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.joined: bool | None = None
        """What :meth:`can_differ` has found, until :meth:`forget`."""

    def forget(self) -> None:
        """Look at the layout again before the next agreement: something was prepared, declared or wrapped."""
        self.joined = None

    @property
    def world_size(self) -> int:
        """How many ranks act together; 1 without torch.distributed, and :func:`apart` from it."""
        if self._apart or not dist.is_available() or not dist.is_initialized():
            return 1
        size = dist.get_world_size(self.group)
        if size < 0:
            raise StateError(
                f"Amp(group=...): this process, rank {dist.get_rank()}, is not in the group; give each rank a group that "
                "it belongs to"
            )
        return size

    def note_averaged(self, params: Iterable[Tensor], group: Any) -> None:
        """Take note that DistributedDataParallel averages the gradients of these parameters over ``group``."""
        for parameter in params:
            self._averaged[parameter] = dist.get_world_size(group)
        self.forget()

    def can_differ(self, params: Callable[[], Iterable[Tensor]]) -> bool:
        """Whether ranks can find different gradients on some parameters, and so must be asked.

        They can with several ranks, unless DistributedDataParallel has averaged all of them over all ranks. The answer
        is kept until :meth:`forget`.
        """
        if self.joined is None:
            world = self.world_size
            if world == 1:
                self.joined = False
            else:
                models = [masters.model_param_of(parameter) for parameter in params()]
                self.joined = not all(
                    self._averaged.get(p) == world and self.pieces.group_of(p) is None
                    for p in models
                    if p.requires_grad
                )
        return self.joined

    def agree(self, flag: Tensor) -> Tensor:
        """Make a non-finite flag (0-dim fp32) the largest over all ranks, in place."""
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return flag

    def norm(
        self,
        params: Iterable[Tensor],
        norm_type: float = 2.0,
        *,
        joined: bool,
        flag: Tensor | None = None,
    ) -> Tensor:
        """Norm of the gradients over whole parameters, each counted once, with a flag in the same number.

        Args:
            params: Those whose gradients are meant, of a model or of its optimizer; those without one are passed over.
            norm_type: 2, any other positive power, or infinity.
            joined: Ask all ranks, as :meth:`can_differ` says. They must all do.
            flag: 0-dim fp32, 1 where a gradient on this rank is not finite. It becomes 1, in place, where that is so on
                any rank, or where the norm is not finite; the norm is then infinite or NaN.

        Returns:
            0-dim fp32, equal on all ranks. What all ranks hold whole counts with its mean over ranks.
        """
        infinite = math.isinf(norm_type)
        world = self.world_size if joined else 1
        by_count: dict[int, list[Tensor]] = {}
        for parameter in params:
            grad = local_grad(parameter)
            if grad is not None and grad.numel():
                grad = grad if grad.dtype is torch.float32 else grad.float()
                by_count.setdefault(self.pieces.count(parameter) if joined else world, []).append(grad)
        parts = []
        for count, grads in by_count.items():
            size = nn.utils.get_total_norm(grads, norm_type)
            parts.append(size if infinite else size**norm_type * (count / world))
        home = parts[0].device if parts else (flag.device if flag is not None else torch.device("cpu"))
        part = torch.zeros((), device=home)
        if parts:
            each = torch.stack([one.to(home) for one in parts]) if len(parts) > 1 else parts[0]
            part = each.amax() if infinite else each.sum()
        if joined:
            if (
                flag is not None
            ):  # one number is half as slow to send as two: an infinite norm says it as well
                part = torch.where(flag.to(home) > 0, math.inf, part)
            dist.all_reduce(part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=self.group)
        if flag is not None:
            flag.copy_(~torch.isfinite(part))  # fused kernels look for exactly 1
        return part if infinite else part ** (1.0 / norm_type)


def local_grad(parameter: Tensor) -> Tensor | None:
    """What this rank holds of a parameter's gradient, in the same memory; values of a sparse one.

    A DTensor gradient that is a partial sum, as tensor parallelism leaves for what every rank holds, is summed first, in
    place of the partial one.
    """
    grad = parameter.grad
    if grad is None:
        return None
    if is_dtensor(grad):
        sharded: Any = grad
        if any(placement.is_partial() for placement in sharded.placements):
            owner: Any = masters.model_param_of(parameter)
            sharded = sharded.redistribute(sharded.device_mesh, owner.placements)
            parameter.grad = sharded
        return _torch.local_tensor(sharded)
    return _torch.dense_values(grad)


def clip_by_norm(params: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place, cut ones too, so that a norm of ``norm`` becomes ``max_norm`` at most."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in params:
        grad = local_grad(parameter)
        if grad is not None:
            by_device.setdefault(grad.device, []).append(grad)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for device, grads in by_device.items():
        _torch.multiply_each(grads, factor.to(device))
