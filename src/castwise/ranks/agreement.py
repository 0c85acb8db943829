"""What the ranks of a session agree on: whether gradients are finite, and global norms.

Each is one all-reduce of one number over all ranks of the session (``Amp(group=...)``, by default all), and where
gradients are clipped both travel in the same message. No group of a mesh is used: a parameter's contribution to the
norm is divided by the number of ranks that hold the same piece of it, so that the plain sum over all ranks counts each
parameter once, whatever mesh it lies on.

Gradients that DistributedDataParallel has averaged over all ranks agree already and nothing is sent for them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from castwise import _torch, masters
from castwise.errors import StateError
from castwise.ranks.group import Ranks
from castwise.ranks.pieces import Pieces, is_dtensor
from castwise.scaler import GradScaler, Window


class Agreement:
    """What the ranks of a group, as :class:`Ranks` takes it, agree on about the parameters of one session's models."""

    def __init__(self, group: Any = None, params: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self.group = group
        self.pieces = Pieces()
        self._params = params
        self._averaged: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._can_differ: bool | None = None
        self._flags_wait = False

    @property
    def ranks(self) -> Ranks:
        """Those of now: a session may be made before its process group."""
        return Ranks(self.group)

    def forget(self) -> None:
        """Look at the layout again before the next agreement: something was prepared, declared or wrapped."""
        self._can_differ = None

    def note_averaged(self, params: Iterable[Tensor], ddp: Any) -> None:
        """Take note that a DistributedDataParallel, which is being made, will average the gradients of these parameters."""
        by = weakref.ref(ddp), dist.get_world_size(ddp.process_group)
        for parameter in params:
            self._averaged[parameter] = by
        self.forget()

    def forget_averaged(self, params: Iterable[Tensor]) -> None:
        """Undo :meth:`note_averaged`, or nothing."""
        for parameter in params:
            self._averaged.pop(parameter, None)
        self.forget()

    def check_even(self, call: str) -> None:
        """See that ranks make the same steps: torch's Join has them end at different ones, and who has ended answers nobody.

        Raises:
            StateError: On every rank in its first step.
        """
        by: Callable[[], Any] = next(iter(self._averaged.values()), (lambda: None, 0))[0]
        if _torch.is_in_join(by()):
            raise StateError(
                f"{call}: DistributedDataParallel is in torch's Join, where ranks end at different steps; {call} has them "
                "talk at each. Give all ranks the same number of batches (DistributedSampler does), or leave it out"
            )

    def _is_averaged(self, parameter: Tensor, world: int) -> bool:
        by: tuple[Callable[[], Any], int] = self._averaged.get(parameter, (lambda: None, 0))
        return by[1] == world and hasattr(by[0](), "reducer")  # what it makes last: its construction can fail

    def can_differ(self) -> bool:
        """Whether ranks can find different gradients on some parameters, and so must be asked.

        They can with several ranks, unless DistributedDataParallel has averaged all of them over all ranks. The answer
        is kept until :meth:`forget`.
        """
        if self._can_differ is None:
            world = self.ranks.size
            self._can_differ = world > 1 and not all(
                self._is_averaged(p, world) and self.pieces.group_of(p) is None
                for p in map(masters.model_param_of, self._params())
                if p.requires_grad
            )
        return self._can_differ

    def agree(self, flag: Tensor) -> Tensor:
        """Make a non-finite flag (0-dim fp32) the largest over all ranks, in place.

        Nothing is sent where all must see the same, or where it travels with the norm.
        """
        if self.can_differ() and not self._flags_wait:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return flag

    def clip(self, params: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm over whole parameters; returns it."""
        joined = self.ranks.size > 1
        if self.can_differ() if joined else any(is_dtensor(masters.model_param_of(p)) for p in params):
            norm = self.norm(params, norm_type, joined=joined)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
        _clip_by(norm, params, max_norm)
        return norm

    def decide_and_clip(
        self, scaler: GradScaler, window: Window, optimizers: Sequence[Optimizer], max_norm: float
    ) -> Tensor:
        """Unscale, agree on the flag and on the norm, in one message, and clip; returns the norm."""
        if not scaler.is_enabled():
            norm = self.clip(_params_of(optimizers), max_norm)
            window.note_norm(optimizers, norm)
            return norm
        late = any(scaler.is_unscaled(optimizer) for optimizer in optimizers)
        differ = self._flags_wait = self.can_differ()
        try:
            for optimizer in optimizers:
                window.unscale_(optimizer)
        finally:
            self._flags_wait = False
        params = _params_of(optimizers)
        if differ:
            flag = scaler.joint_flag(optimizers)
            norm = self.norm(params, joined=True, flag=flag)
            scaler.set_flag(optimizers, flag)
            _clip_by(norm, params, max_norm)
            return norm
        scaler.decide_together(optimizers)
        norm = self.clip(params, max_norm)
        if late:  # gradients may have changed since they were looked at
            window.note_norm(optimizers, norm)
        return norm

    def norm(
        self, params: Iterable[Tensor], norm_type: float = 2.0, *, joined: bool, flag: Tensor | None = None
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
        world = self.ranks.size if joined else 1
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


def _params_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _clip_by(norm: Tensor, params: Iterable[Tensor], max_norm: float) -> None:
    """Scale gradients in place, cut ones too, so that their norm becomes ``max_norm`` at most."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in params:
        grad = local_grad(parameter)
        if grad is not None:
            by_device.setdefault(grad.device, []).append(grad)
    norm = norm.nan_to_num(0.0, 0.0)  # what is not finite stays to be seen
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for device, grads in by_device.items():
        _torch.multiply_each(grads, factor.to(device))
