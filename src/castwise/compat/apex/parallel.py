"""``apex.parallel`` on ``torch.nn.parallel``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from castwise.compat.apex._missing import missing

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

_MEBI = 2**20


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's, with Apex's arguments.

    Args:
        module: As ``amp.initialize`` returned it.
        message_size: Elements per message, taken as fp32.
        delay_allreduce: Parameters may go without gradients, which torch has to look for in each pass.
        shared_param: Refused, as in Apex.
        allreduce_trigger_params: Refused: torch makes its own buckets.
        retain_allreduce_buffers: Refused: torch's ``gradient_as_bucket_view`` is the nearest.
        allreduce_always_fp32: Reduce half gradients in fp32.
        num_allreduce_streams: Ignored; torch sends while backward runs.
        allreduce_communicators: Refused.
        gradient_average: False sums gradients instead.
        gradient_predivide_factor: Ignored: torch divides before it sums.
        gradient_average_split_factor: Ignored.
        prof: Ignored.
        kwargs: For torch's class: ``process_group``, ``find_unused_parameters`` and others.

    Raises:
        ValueError: An argument that was refused.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        **kwargs: Any,
    ) -> None:
        if shared_param is not None:
            raise ValueError(
                "shared_param is no longer supported as an option.  It was misleadingly named from the start.  It turns out "
                "overlapping communication with computation should work fine with shared parameters.  If you still wish to "
                "delay communication to the end of the backward pass, use delay_allreduce=True|False instead."
            )
        for name, value in (
            ("allreduce_trigger_params", allreduce_trigger_params),
            ("retain_allreduce_buffers", retain_allreduce_buffers),
            ("allreduce_communicators", allreduce_communicators),
        ):
            if value:
                raise ValueError(
                    f"DistributedDataParallel({name}=...): torch's has nothing of the kind; leave it out"
                )
        kwargs.setdefault("find_unused_parameters", delay_allreduce)
        kwargs.setdefault("bucket_cap_mb", max(1, round(4 * message_size / _MEBI)))
        super().__init__(module, **kwargs)
        if not gradient_average or allreduce_always_fp32:
            self.register_comm_hook(self.process_group, _Reduction(gradient_average, allreduce_always_fp32))


class _Reduction:
    """Communication hook: sums, or averages, and in fp32 if asked."""

    def __init__(self, average: bool, in_fp32: bool) -> None:
        self._average, self._in_fp32 = average, in_fp32
        self.__name__ = type(self).__name__

    def __call__(self, group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        sent = buffer.float() if self._in_fp32 else buffer.clone()
        if self._average:
            sent /= dist.get_world_size(group)
        future: Any = dist.all_reduce(sent, group=group, async_op=True)

        def take(done: Any) -> torch.Tensor:
            buffer.copy_(done.value()[0])
            return buffer  # type: ignore[no-any-return]

        result: torch.futures.Future[torch.Tensor] = future.get_future().then(take)
        return result


if dist.is_available():  # DistributedDataParallel compares the annotations themselves, not their texts
    _Reduction.__call__.__annotations__.update(
        {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}  # type: ignore[attr-defined]
    )


class Reducer:
    """Averages gradients over all ranks when it is told to.

    Args:
        module_or_grads_list: A module, whose parameters are made the first rank's at once; or a list of gradients.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[torch.Tensor]) -> None:
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads = [] if isinstance(module_or_grads_list, nn.Module) else list(module_or_grads_list)
        if self.module is not None:
            for parameter in self.module.parameters():
                dist.broadcast(parameter.detach(), 0)

    def reduce(self) -> None:
        """Average the gradients, in place. All ranks must have the same ones."""
        grads = (
            self.grads
            if self.module is None
            else [p.grad for p in self.module.parameters() if p.grad is not None]
        )
        for grad in grads:
            dist.all_reduce(grad.div_(dist.get_world_size()))


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's, with Apex's arguments.

    Args:
        num_features: Channels.
        eps: Added to the variance.
        momentum: Of the running statistics.
        affine: Whether it has weights.
        track_running_stats: Whether it keeps running statistics.
        process_group: Ranks that share statistics.
        channel_last: Ignored: torch goes by the tensor's own memory format.
        fuse_relu: Refused.

    Raises:
        ValueError: ``fuse_relu=True``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        if fuse_relu:
            raise ValueError("SyncBatchNorm(fuse_relu=True): torch has no fused form; add a ReLU after it")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Replace every BatchNorm by torch's SyncBatchNorm.

    Args:
        module: Changed in place, itself excepted.
        process_group: Ranks that share statistics.
        channel_last: Ignored.

    Returns:
        The module, or what replaces it.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Groups of ``group_size`` neighbouring ranks, made by all ranks together.

    Returns:
        This rank's; None for ``group_size=0``, which means all.

    Raises:
        ValueError: A size that does not divide the number of ranks.
    """
    if group_size == 0:
        return None
    world = dist.get_world_size()
    if group_size > world or world % group_size:
        raise ValueError(f"create_syncbn_process_group({group_size}): must divide the {world} ranks")
    mine = None
    for first in range(0, world, group_size):
        group = dist.new_group(list(range(first, first + group_size)))
        if first <= dist.get_rank() < first + group_size:
            mine = group
    return mine


class LARC:
    """Layer-wise adaptive rates around any torch optimizer.

    Each gradient is multiplied by ``trust * |w| / (|g| + decay * |w| + eps)``, divided by the group's rate and cut at 1
    where ``clip`` is set.

    Args:
        optimizer: To wrap; its weight decay is applied here.
        trust_coefficient: As said.
        clip: Whether the optimizer's own rate is the largest.
        eps: As said.

    Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        # _amp_stash and the like are this object's own, or nobody's.
        if name.startswith("_") or name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Adapt the gradients, in place, then step."""
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        try:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = 0
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._adapt(parameter, group["lr"], decay)
            return self.optim.step(*args, **kwargs)
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay

    def _adapt(self, parameter: torch.Tensor, rate: float, decay: float) -> None:
        weights, grad = parameter.detach(), parameter.grad
        assert grad is not None
        weight_norm, grad_norm = torch.linalg.vector_norm(weights), torch.linalg.vector_norm(grad)
        factor = self.trust_coefficient * weight_norm / (grad_norm + weight_norm * decay + self.eps)
        if self.clip:
            factor = (factor / rate).clamp(max=1)
        # Where either norm is zero, the gradient and its decay stay out of it, as in Apex.
        alive = (weight_norm != 0) & (grad_norm != 0)
        grad.copy_(torch.where(alive, (grad + decay * weights) * factor, grad))


__getattr__ = missing(
    __name__,
    {"multiproc": "torchrun starts the processes", "sync_batchnorm": "use apex.parallel.SyncBatchNorm"},
)
