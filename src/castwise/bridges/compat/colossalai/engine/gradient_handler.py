"""Averages gradients over data parallel ranks where DistributedDataParallel does not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from castwise.bridges.compat.colossalai.context import ParallelMode
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.core.masters import model_param_of

__all__ = ["DataParallelGradientHandler", "local_grad"]

_BUCKET = 2**24
"""The number of gradient elements per all-reduce: 64 MiB in fp32, which are allocated in addition to the gradients."""


def local_grad(parameter: Tensor) -> Tensor | None:
    """Return this rank's part of a parameter's gradient, as a tensor that shares the gradient's memory.

    For a sparse gradient, the part is its values. A DTensor gradient that is a partial sum is first replaced by the sum over
    ranks. Tensor parallelism leaves such gradients for replicated parameters.
    """
    grad: Any = parameter.grad
    if hasattr(grad, "to_local"):
        if any(placement.is_partial() for placement in grad.placements):
            owner: Any = model_param_of(parameter)
            grad = parameter.grad = grad.redistribute(grad.device_mesh, owner.placements)
        with torch.no_grad():
            grad = grad.to_local()
    elif grad is not None and grad.is_sparse:
        parameter.grad = grad.coalesce()
        grad = parameter.grad.values()
    local: Tensor | None = grad
    return local


class DataParallelGradientHandler:
    """Averages the gradients of an optimizer over the data parallel ranks, once per step.

    It is used for pipeline stages and for tensor parallel weights. The gradients may still be scaled by the loss scale. The
    gradients of fp32 master weights are sent in fp32. If a value is not finite on one rank, it is not finite on any rank
    afterwards.
    """

    def __init__(self, optimizer: Optimizer, group: Any = None) -> None:
        self._optimizer = optimizer
        self._group = group

    def handle_gradient(self) -> None:
        """Average the gradients in place. A missing gradient counts as zero if another rank has this gradient."""
        group = self._group if self._group is not None else gpc.get_group(ParallelMode.DATA)
        params = [p for each in self._optimizer.param_groups for p in each["params"] if p.requires_grad]
        if not params or dist.get_world_size(group) == 1:
            return
        have = torch.tensor([float(p.grad is not None) for p in params], device=params[0].device)
        dist.all_reduce(have, group=group)
        grads: dict[torch.dtype, list[Tensor]] = {}
        for parameter, count in zip(params, have.tolist(), strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if count:
                grad = local_grad(parameter)
                assert grad is not None
                grads.setdefault(grad.dtype, []).append(grad)
        for some in grads.values():
            for bucket in _buckets(some):
                _average(bucket, group)


def _buckets(grads: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = [[]]
    size = 0
    for grad in grads:
        if size and size + grad.numel() > _BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(grad)
        size += grad.numel()
    return buckets


def _average(grads: list[Tensor], group: Any) -> None:
    # divided before the sum: the sum of scaled fp16 gradients can overflow where their mean does not
    flat = torch.cat([grad.reshape(-1) for grad in grads]) / dist.get_world_size(group)
    dist.all_reduce(flat, group=group)
    for grad, values in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(values.view_as(grad))
