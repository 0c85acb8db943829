"""Commands under ``torchrun``: its processes join one group for as long as a command runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from castwise.casting.context import default_device_type
from castwise.errors import DeviceError, StateError

__all__ = ["joined"]


@contextlib.contextmanager
def joined(device: str | None, call: str) -> Iterator[tuple[int, str | None]]:
    """Join the process group that torchrun's environment describes; nothing to do for a process started alone.

    gloo connects CPUs and nccl CUDA devices, of which each process takes the one of its ``LOCAL_RANK``.

    Args:
        device: What the user asked for.
        call: The caller, for errors.

    Yields:
        The rank of this process, 0 for one alone, and its device.

    Raises:
        DeviceError: There are more processes than devices.
        StateError: The other processes cannot be reached.
    """
    if dist.is_available() and dist.is_initialized():
        yield dist.get_rank(), device
        return
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    alone = not all(name in os.environ for name in names) or int(os.environ["WORLD_SIZE"]) == 1
    if alone or not dist.is_available():
        yield 0, device
        return
    where = torch.device(device if device is not None else default_device_type())
    backend = "gloo"
    if where.type == "cuda":
        backend = "nccl"
        if where.index is None:
            where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if where.index >= torch.cuda.device_count():
            raise DeviceError(
                f"{call}: rank {os.environ['RANK']} is to use {where}, but this machine shows {torch.cuda.device_count()} "
                "CUDA devices; start no more processes here than that (--nproc-per-node)"
            )
        torch.cuda.set_device(where)
    try:
        dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:
        raise StateError(
            f"{call}: rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot reach the others: {error}"
        ) from error
    try:
        yield dist.get_rank(), str(where)
    finally:
        dist.destroy_process_group()
