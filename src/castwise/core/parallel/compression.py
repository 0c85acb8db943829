"""Send gradients in bf16 or fp16, with communication hooks for DistributedDataParallel.

torch's own ``bf16_compress_hook`` requires NCCL. Its ``fp16_compress_hook`` casts before it divides by the number of
ranks, so sums of scaled gradients overflow where their mean would not. The hooks of this module divide first, in fp32,
and work on every backend.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _compressed(group: Any, bucket: Any, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    group = group if group is not None else dist.group.WORLD
    buffer = bucket.buffer()
    low = (buffer / dist.get_world_size(group)).to(dtype)
    future: Any = dist.all_reduce(low, group=group, async_op=True)

    def widen(done: Any) -> Tensor:
        buffer.copy_(done.value()[0])
        return buffer  # type: ignore[no-any-return]

    result: torch.futures.Future[Tensor] = future.get_future().then(widen)
    return result


def compress_to_bf16(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over ranks in bf16, which sends half the bytes of fp32.

    This is a communication hook for DistributedDataParallel: ``ddp.register_comm_hook(group, compress_to_bf16)``.
    Each gradient keeps 8 significant bits.

    Args:
        group: The process group, which is the first argument of ``register_comm_hook``. None stands for all ranks.
        bucket: A bucket of DistributedDataParallel. Its buffer ``[elements]`` keeps its dtype.

    Returns:
        A future of the buffer, averaged over ranks.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``. This hook can be used like those.
    """
    return _compressed(group, bucket, torch.bfloat16)


def compress_to_fp16(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over ranks in fp16, which sends half the bytes of fp32.

    This is a communication hook for DistributedDataParallel, with the arguments of :func:`compress_to_bf16`. Each
    gradient keeps 11 significant bits. Values that overflow fp16 become infinite on all ranks. Under a plan with a
    loss scale, the step is then skipped and the scale shrinks. Values below 6e-8 are lost.
    """
    return _compressed(group, bucket, torch.float16)


if dist.is_available():  # DistributedDataParallel compares the annotation objects, not their text
    for _hook in (compress_to_bf16, compress_to_fp16):
        _hook.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[Tensor]})  # type: ignore[attr-defined]
