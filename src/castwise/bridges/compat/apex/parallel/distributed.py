"""``apex.parallel.distributed``, implemented with ``torch.nn.parallel``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["DistributedDataParallel", "Reducer"]

_MEBI = 2**20


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Works as torch's DistributedDataParallel, and accepts Apex's arguments as well as torch's.

    The arguments ``num_allreduce_streams``, ``gradient_predivide_factor``, ``gradient_average_split_factor`` and
    ``prof`` are ignored.

    Args:
        module: The module that ``amp.initialize`` returned.
        message_size: The number of elements in a gradient bucket. The size of the bucket in bytes is computed as if the
            elements were fp32.
        delay_allreduce: Whether some parameters may get no gradient. This is torch's ``find_unused_parameters``.
        allreduce_always_fp32: Whether gradients are reduced in fp32, whatever their dtype.
        gradient_average: Whether gradients are averaged over the ranks. With False, they are summed.

    Raises:
        ValueError: ``shared_param`` is given, which Apex does not allow either. Or one of ``allreduce_trigger_params``,
            ``retain_allreduce_buffers`` and ``allreduce_communicators`` is given, which torch does not have. torch's
            ``gradient_as_bucket_view`` is similar to ``retain_allreduce_buffers``.
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
                    f"DistributedDataParallel({name}=...): torch's DistributedDataParallel has no such option; leave it out"
                )
        kwargs.setdefault("find_unused_parameters", delay_allreduce)
        kwargs.setdefault("bucket_cap_mb", max(1, round(4 * message_size / _MEBI)))
        super().__init__(module, **kwargs)
        if not gradient_average or allreduce_always_fp32:
            self.register_comm_hook(self.process_group, _reduction(gradient_average, allreduce_always_fp32))


def _reduction(average: bool, in_fp32: bool) -> Any:
    """Return a DDP communication hook that sums or averages gradients, in fp32 if requested."""

    def reduce(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        sent = buffer.float() if in_fp32 else buffer.clone()
        if average:
            sent /= dist.get_world_size(group)
        future: Any = dist.all_reduce(sent, group=group, async_op=True)

        def take(done: Any) -> torch.Tensor:
            buffer.copy_(done.value()[0])
            return buffer  # type: ignore[no-any-return]

        result: torch.futures.Future[torch.Tensor] = future.get_future().then(take)
        return result

    # register_comm_hook compares the hook's annotations with these objects; their text does not suffice
    reduce.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})  # type: ignore[attr-defined]
    return reduce


class Reducer:
    """Averages gradients over all ranks when :meth:`reduce` is called.

    Args:
        module_or_grads_list: The module whose gradients are averaged, or a list of gradients. A module's parameters are
            set to those of rank 0 when the reducer is created.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[torch.Tensor]) -> None:
        self.module = module_or_grads_list if isinstance(module_or_grads_list, nn.Module) else None
        self.grads = [] if isinstance(module_or_grads_list, nn.Module) else list(module_or_grads_list)
        if self.module is not None:
            for parameter in self.module.parameters():
                dist.broadcast(parameter.detach(), 0)

    def reduce(self) -> None:
        """Average the gradients over all ranks, in place.

        All ranks must call this, and the same parameters must have gradients on each of them.
        """
        grads = (
            self.grads
            if self.module is None
            else [p.grad for p in self.module.parameters() if p.grad is not None]
        )
        for grad in grads:
            dist.all_reduce(grad.div_(dist.get_world_size()))
