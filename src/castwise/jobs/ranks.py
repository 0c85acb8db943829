"""The processes of a training: started by torchrun, joined into a group and a device mesh, heard as one."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from castwise.errors import DeviceError, PlanError
from castwise.jobs.layout import Layout, Place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Ranks", "first_fault", "join", "started"]


def started() -> tuple[int, int]:
    """This process's rank and the number of processes, by the process group or torchrun's environment.

    Returns:
        Both; ``(0, 1)`` for a process that was started by itself.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Ranks:
    """The processes of one training, as one of them sees them.

    Attributes:
        layout: What they share out.
        device: This process's.
        rank: This process's, from 0.
        mesh: Dimensions named pp, dp, fsdp and tp, those of them that the layout has; None for a single process.
    """

    layout: Layout
    device: torch.device
    rank: int = 0
    mesh: DeviceMesh | None = None

    @property
    def place(self) -> Place:
        """Where this process stands."""
        return self.layout.place(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def of(self, *names: str) -> Any:
        """The mesh of some dimensions.

        Args:
            names: Such as ``tp``.
        """
        assert self.mesh is not None
        return self.mesh[names if len(names) > 1 else names[0]]

    def add_up(self, figures: torch.Tensor) -> torch.Tensor:
        """Sum over all processes.

        Args:
            figures: On any device; every process must call with the same shape and dtype.

        Returns:
            The sum, on the CPU. Synchronises with the device.
        """
        if self.mesh is None:
            return figures.cpu()
        here = figures.to(self.device)
        dist.all_reduce(here)
        return here.cpu()


@contextlib.contextmanager
def join(layout: Layout | str | None, device: torch.device) -> Iterator[Ranks]:
    """Bring the processes together for a training.

    A process group that is there already is used and left as it is; else one is made from torchrun's environment, gloo
    on the CPU and NCCL on CUDA, and ended after the training.

    Args:
        layout: A layout, its text, or None: data-parallel over as many processes as were started.
        device: Where to train; on CUDA without an index each process takes that of its ``LOCAL_RANK``.

    Yields:
        The ranks.

    Raises:
        PlanError: A layout that cannot be, or whose size is not the number of processes.
        DeviceError: A device that cannot be had by all processes.
    """
    rank, world = started()
    if layout is None:
        layout = Layout(dp=world)
    elif isinstance(layout, str):
        layout = Layout.parse(layout)
    layout.check(world)
    if world == 1:
        yield Ranks(layout, device)
        return
    if not dist.is_available():
        raise PlanError(
            f"layout {layout}: this build of torch has no torch.distributed; train on one process"
        )
    device = _own_device(device, layout)
    ours = not dist.is_initialized()
    if ours:
        with_id = device if device.type == "cuda" else None
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=with_id)
    from torch.distributed.device_mesh import init_device_mesh

    dims = layout.mesh_dims()
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    yield Ranks(layout, device, rank, mesh)
    # Not after an error: ending a group waits for ranks that may be gone, and the process ends anyway.
    if ours:
        dist.destroy_process_group()


def _own_device(device: torch.device, layout: Layout) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(
            f"layout {layout}: several processes train on cpu or cuda, not on {device.type}; use --device cpu"
        )
    if device.type == "cpu" or not torch.cuda.is_available():
        return device
    if device.index is not None and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise DeviceError(
            f"layout {layout}: all processes of this machine would use {device}; give --device cuda, and each takes its own"
        )
    local = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise DeviceError(
            f"layout {layout}: process {local} of this machine needs a GPU of its own, but there are "
            f"{torch.cuda.device_count()}; start fewer processes, or give --device cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def first_fault(text: str) -> str:
    """Tell the other processes what went wrong, and hear whether something went wrong elsewhere before.

    When a rank fails, the others fail too, in the middle of talking to it; what they say is noise. The store that
    torchrun gives all ranks keeps the first sentence.

    Args:
        text: What went wrong here.

    Returns:
        ``text``, with this rank's name where there are several; or the sentence of the rank that failed first.
    """
    rank, world = started()
    if world == 1:
        return text
    mine = f"rank {rank}: {text}"
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        return mine
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    try:
        wait = datetime.timedelta(seconds=5)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, wait_for_workers=False, timeout=wait
        )
        said = store.compare_set(f"castwise/fault/{attempt}", "", mine)
    except (RuntimeError, ValueError):  # the store is gone, or was never there
        return mine
    return said.decode() if isinstance(said, bytes) else str(said)
