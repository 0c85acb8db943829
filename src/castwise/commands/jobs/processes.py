"""Joins the processes that torchrun started into a process group and a device mesh."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from castwise.commands.jobs.layout import Coordinate, Layout
from castwise.core import devices
from castwise.core.parallel import init_process_group
from castwise.core.ranks.group import ALONE, Ranks, running
from castwise.errors import DeviceError, StateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def started() -> tuple[int, int]:
    """Return this process's rank and the number of processes, from the process group or torchrun's environment variables."""
    if running():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class TrainingRanks(Ranks):
    """The processes of a training, with the rank, the device and the device mesh of this process.

    The dimensions of the mesh are those of the layout, out of pp, dp, fsdp and tp. A single process has no mesh.
    """

    def __init__(self, layout: Layout, device: torch.device, mesh: DeviceMesh | None = None) -> None:
        super().__init__(ALONE if mesh is None else None)
        self.layout, self.device, self.mesh = layout, device, mesh

    @property
    def place(self) -> Coordinate:
        """The position of this process in the layout."""
        return self.layout.place(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def of(self, *names: str) -> Any:
        """Return the submesh of one or more dimensions of the mesh, such as ``tp``."""
        assert self.mesh is not None
        return self.mesh[names if len(names) > 1 else names[0]]

    def add_up(self, figures: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes, on the CPU. Synchronises with the device."""
        here = figures.to(self.device)
        if self.size > 1:
            dist.all_reduce(here)
        return here.cpu()


@contextlib.contextmanager
def joined(device: torch.device, call: str) -> Iterator[tuple[int, torch.device]]:
    """Join the processes that torchrun started into a process group, inside a ``with`` block.

    A process group that exists already is used and kept. Otherwise a group is created, with torch's backend for the device, and
    destroyed afterwards. A process that was started alone creates no group.

    Args:
        device: The device to compute on. For an accelerator without an index, each process uses its ``LOCAL_RANK`` as the index.
        call: The name of the caller, for error messages.

    Yields:
        This process's rank and device.

    Raises:
        DeviceError: The device is not available to all processes.
        StateError: The other processes cannot be reached.
    """
    rank, world = started()
    if world == 1:
        yield rank, device
        return
    if not dist.is_available():
        raise StateError(
            f"{call}: {world} processes were started, but this build of torch has no torch.distributed"
        )
    device = _own_device(device, call)
    ours = not running()
    if ours:
        backend = dist.get_default_backend_for_device(device)
        try:
            init_process_group(backend, device_id=None if device.type == "cpu" else device)
        except (RuntimeError, ValueError) as error:
            raise StateError(f"{call}: rank {rank} of {world} cannot reach the others: {error}") from error
    yield rank, device
    # This is not done after an error: destroying a group waits for ranks that may be gone, and the process ends anyway.
    if ours:
        dist.barrier()  # gloo aborts more often if a rank leaves while others still communicate
        dist.destroy_process_group()


@contextlib.contextmanager
def join(layout: Layout | str | None, device: torch.device) -> Iterator[TrainingRanks]:
    """Join the processes of a training as a layout says, inside a ``with`` block, and yield the :class:`TrainingRanks`.

    Without a layout, all processes are data-parallel.

    Raises:
        PlanError: The layout is invalid, or is for another number of processes.
        DeviceError: The device is not available to all processes.
        StateError: The other processes cannot be reached.
    """
    _, world = started()
    if layout is None:
        layout = Layout(dp=world)
    elif isinstance(layout, str):
        layout = Layout.parse(layout)
    layout.check(world)
    with joined(device, f"layout {layout}") as (_, own):
        mesh = None
        if world > 1:
            from torch.distributed.device_mesh import init_device_mesh

            dims = layout.mesh_dims()
            mesh = init_device_mesh(own.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        yield TrainingRanks(layout, own, mesh)


def _own_device(device: torch.device, call: str) -> torch.device:
    kind = device.type
    if kind == "cpu" or not devices.is_available(kind):
        return device
    if device.index is not None and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise DeviceError(
            f"{call}: all processes of this machine would use {device}; give --device {kind}, and each process takes its own"
        )
    local = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
    if local >= (count := devices.count(kind)):
        raise DeviceError(
            f"{call}: process {local} of this machine needs a {kind} device of its own, but the machine has {count}; start fewer "
            "processes, or give --device cpu"
        )
    try:
        dist.get_default_backend_for_device(kind)
    except ValueError:
        raise DeviceError(
            f"{call}: several processes cannot compute on {kind}, since torch.distributed has no backend for it; use --device cpu"
        ) from None
    torch.accelerator.set_device_index(local)
    return torch.device(kind, local)


def first_fault(text: str) -> str:
    """Report an error of this process to the other processes, and return the error that occurred first on any of them.

    When a rank fails, the other ranks fail too while they communicate with it, and only the first error tells the cause.
    torchrun's shared store keeps the first error.

    Returns:
        The first error. With several ranks, the number of the rank precedes the text.
    """
    rank, world = started()
    if world == 1:
        return text
    mine = f"rank {rank}: {text}"
    env = os.environ
    attempt = f"{env.get('TORCHELASTIC_RUN_ID')}/{env.get('TORCHELASTIC_RESTART_COUNT')}"
    wait = datetime.timedelta(seconds=5)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, wait_for_workers=False, timeout=wait
        )
        said = store.compare_set(f"castwise/fault/{attempt}", "", mine)
    except (KeyError, RuntimeError, ValueError):  # the store is gone or never existed
        return mine
    return said.decode() if isinstance(said, bytes) else str(said)
