"""``apex.parallel.SyncBatchNorm``, implemented with ``torch.nn.SyncBatchNorm``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """Works as ``torch.nn.SyncBatchNorm``, with Apex's arguments.

    ``channel_last`` is ignored, since torch follows the memory format of the input.

    Raises:
        ValueError: ``fuse_relu`` is True.
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
    """Replace every BatchNorm in a module by ``torch.nn.SyncBatchNorm``, in place.

    Returns:
        The module, or its replacement if the module is itself a BatchNorm.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    return converted


def create_syncbn_process_group(group_size: int) -> Any:
    """Create process groups of ``group_size`` consecutive ranks each, and return the group that contains this rank.

    All ranks must call this function.

    Args:
        group_size: The number of ranks in each group. With 0, no groups are created and None is returned, which means
            all ranks.

    Raises:
        ValueError: The size does not divide the number of ranks.
    """
    if group_size == 0:
        return None
    world = dist.get_world_size()
    if group_size > world or world % group_size:
        raise ValueError(
            f"create_syncbn_process_group({group_size}): group_size must divide the number of ranks, {world}"
        )
    return dist.new_subgroups(group_size)[0]
