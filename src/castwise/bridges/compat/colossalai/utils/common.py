"""``colossalai.utils.common``: small helpers, most of which ask for the rank of this process."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from castwise.bridges.compat.colossalai.context import ParallelMode
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.bridges.compat.coverage import missing_attribute

__all__ = [
    "free_port",
    "is_dp_rank_0",
    "is_no_pp_or_last_stage",
    "is_tp_rank_0",
    "is_using_ddp",
    "is_using_pp",
    "print_rank_0",
    "set_seed",
]
__getattr__ = missing_attribute("colossalai.utils")


def is_dp_rank_0() -> bool:
    """Whether this is the first data parallel rank."""
    return gpc.is_first_rank(ParallelMode.DATA)


def is_tp_rank_0() -> bool:
    """Whether this is the first tensor parallel rank."""
    return gpc.is_first_rank(ParallelMode.TENSOR)


def is_no_pp_or_last_stage() -> bool:
    """Return whether this process has the output of the model.

    This is so if there is no pipeline, or if the process runs the last stage of the pipeline.
    """
    return gpc.is_last_rank(ParallelMode.PIPELINE)


def speaks_for_all() -> bool:
    """Whether this rank shows progress and logs for all ranks: it is the first rank that has the model's output."""
    return is_dp_rank_0() and is_tp_rank_0() and is_no_pp_or_last_stage()


def is_using_ddp() -> bool:
    """Whether there is more than one data parallel rank."""
    return gpc.get_world_size(ParallelMode.DATA) > 1


def is_using_pp() -> bool:
    """Whether the model is split into pipeline stages."""
    return gpc.get_world_size(ParallelMode.PIPELINE) > 1


def print_rank_0(message: str, logger: Any = None) -> None:
    """Print a message, or log it if a logger is given, on rank 0 only."""
    if gpc.get_global_rank() == 0:
        print(message, flush=True) if logger is None else logger.info(message)


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch, equally on all ranks."""
    gpc.set_seed(seed)


def free_port() -> int:
    """Return a TCP port of this machine on which no process listens."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
        return port


def broadcast_from_first(model: nn.Module, group: Any) -> None:
    """Give every rank of a group the weights and buffers of the first rank."""
    source = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.data
            dist.broadcast(local, source, group=group)
