"""``colossalai.utils``: loaders, timers, checkpoints and small questions."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from castwise import Amp
from castwise.casting import default_device_type
from castwise.checkpoint import load, newest, save
from castwise.compat.colossalai.context import ParallelMode
from castwise.compat.colossalai.core import global_context as gpc
from castwise.compat.coverage import missing_attribute
from castwise.errors import StateError

__all__ = [
    "DataParallelSampler",
    "MultiTimer",
    "Timer",
    "get_current_device",
    "get_dataloader",
    "is_dp_rank_0",
    "is_no_pp_or_last_stage",
    "is_tp_rank_0",
    "is_using_ddp",
    "is_using_pp",
    "load_checkpoint",
    "print_rank_0",
    "report_memory_usage",
    "save_checkpoint",
    "synchronize",
]
__getattr__ = missing_attribute("colossalai.utils")


# --- where this process is ------------------------------------------------------------------------------------


def get_current_device() -> torch.device:
    """The accelerator of this process, or the CPU where there is none."""
    kind = default_device_type()
    return (
        torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )


def synchronize() -> None:
    """Wait for the device."""
    if get_current_device().type != "cpu":
        torch.accelerator.synchronize()


def is_dp_rank_0() -> bool:
    """Whether this is the first data parallel rank."""
    return gpc.is_first_rank(ParallelMode.DATA)


def is_tp_rank_0() -> bool:
    """Whether this is the first tensor parallel rank."""
    return gpc.is_first_rank(ParallelMode.TENSOR)


def is_no_pp_or_last_stage() -> bool:
    """Whether this process sees the model's output: there is no pipeline, or it holds the last stage."""
    return gpc.is_last_rank(ParallelMode.PIPELINE)


def speaks_for_all() -> bool:
    """Whether this rank shows and logs what all would: it sees the model's output, and is the first that does."""
    return is_dp_rank_0() and is_tp_rank_0() and is_no_pp_or_last_stage()


def is_using_ddp() -> bool:
    """Whether there is more than one data parallel rank."""
    return gpc.get_world_size(ParallelMode.DATA) > 1


def is_using_pp() -> bool:
    """Whether there is a pipeline."""
    return gpc.get_world_size(ParallelMode.PIPELINE) > 1


def print_rank_0(message: str, logger: Any = None) -> None:
    """Print, or log, on the first rank alone."""
    if gpc.get_global_rank() == 0:
        print(message, flush=True) if logger is None else logger.info(message)


def report_memory_usage(message: str, logger: Any = None, report_cpu: bool = False) -> None:
    """Say how much memory of the device is and was in use, on the first rank.

    On a CPU it is the process's largest size, which ``report_cpu`` adds on an accelerator too.
    """
    parts = []
    if get_current_device().type == "cuda":
        kinds = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        parts = [
            f"{kind.replace('memory_', '').replace('_', ' ')} {getattr(torch.cuda, kind)() / 2**20:.1f} MiB"
            for kind in kinds
        ]
    if report_cpu or not parts:
        import resource

        parts.append(f"process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.1f} MiB at most")
    print_rank_0(f"{message}: {', '.join(parts)}", logger)


# --- data -----------------------------------------------------------------------------------------------------


class DataParallelSampler(DistributedSampler[Any]):
    """torch's for the data parallel ranks; with ``shuffle`` in a new order each time it is gone through."""

    def __init__(
        self, dataset: Dataset[Any], shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> None:
        super().__init__(
            dataset,
            num_replicas=gpc.get_world_size(ParallelMode.DATA),
            rank=gpc.get_local_rank(ParallelMode.DATA),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return order


def get_dataloader(
    dataset: Dataset[Any],
    shuffle: bool = False,
    seed: int = 1024,
    add_sampler: bool = True,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **kwargs: Any,
) -> DataLoader[Any]:
    """``torch.utils.data.DataLoader``, whose data parallel ranks read different parts unless ``add_sampler=False``.

    Order and workers are seeded by ``seed``; memory is pinned only where there is an accelerator.
    """

    def seed_worker(worker: int) -> None:
        random.seed(seed)
        torch.manual_seed(seed)

    common = {
        "drop_last": drop_last,
        "pin_memory": pin_memory and get_current_device().type != "cpu",  # torch warns elsewhere
        "num_workers": num_workers,
        "worker_init_fn": seed_worker,
        **kwargs,
    }
    if add_sampler and gpc.get_world_size(ParallelMode.DATA) > 1:
        sampler = DataParallelSampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last)
        return DataLoader(dataset, sampler=sampler, **common)
    return DataLoader(dataset, shuffle=shuffle, **common)


# --- time -----------------------------------------------------------------------------------------------------


class Timer:
    """Seconds from :meth:`start` to :meth:`stop`, the device's work included."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._elapsed_s = 0.0
        self._history: list[float] = []

    @property
    def has_history(self) -> bool:
        """Whether an interval was kept."""
        return bool(self._history)

    def start(self) -> None:
        """Begin; waits for the device."""
        synchronize()
        self._begun_s = time.perf_counter()

    def stop(self, keep_in_history: bool = False) -> float:
        """End, and remember the interval if asked; waits for the device. Returns its length in seconds."""
        if self._begun_s is None:
            raise StateError("Timer.stop: it was not started; call start() first")
        synchronize()
        self._elapsed_s = time.perf_counter() - self._begun_s
        self._begun_s = None
        if keep_in_history:
            self._history.append(self._elapsed_s)
        return self._elapsed_s

    def get_elapsed_time(self) -> float:
        """The last interval in seconds."""
        return self._elapsed_s

    def get_history_sum(self) -> float:
        """The sum of the intervals kept, in seconds."""
        return sum(self._history)

    def get_history_mean(self) -> float:
        """The mean of the intervals kept, in seconds; 0 without any."""
        return sum(self._history) / len(self._history) if self._history else 0.0

    def forget_first(self, count: int) -> None:
        """Leave out the first intervals, which are slower than the rest."""
        del self._history[:count]

    def reset(self) -> None:
        """Forget everything."""
        self._begun_s, self._elapsed_s = None, 0.0
        self._history.clear()


class MultiTimer:
    """Timers by name, which do nothing while they are not ``on``."""

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Start a timer, made when it is first named."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """Stop a timer; its interval in seconds, None where timers are off."""
        return self._timers[name].stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """A timer by its name."""
        return self._timers.setdefault(name, Timer())

    def reset(self, name: str | None = None) -> None:
        """Reset a timer, or all."""
        for known, timer in self._timers.items():
            if name in (None, known):
                timer.reset()

    def is_on(self) -> bool:
        """Whether it measures."""
        return self._on

    def set_status(self, mode: bool) -> None:
        """Turn it on or off."""
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        yield from self._timers.items()


# --- checkpoints ----------------------------------------------------------------------------------------------


def _session(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What ``castwise.checkpoint`` takes of an engine's model and optimizer."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    parts = list(inner) if isinstance(inner, nn.ModuleList) and Amp.of(inner) is None else [inner]
    amp = Amp.of(parts[0])
    if amp is None:
        raise StateError(
            "save_checkpoint and load_checkpoint take the model of an engine (engine.model): this one was not prepared by "
            "colossalai.initialize or convert_to_amp"
        )
    optimizers = () if optimizer is None else getattr(optimizer, "optimizer", optimizer)
    return {"model": parts, "optimizers": optimizers, "amp": amp}


def save_checkpoint(
    file: str | os.PathLike[str],
    epoch: int,
    model: nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    **kwargs: Any,
) -> None:
    """Save an engine's model and optimizer, from all ranks, so that they resume under any mode and layout.

    Args:
        file: A folder; a checkpoint of castwise appears in it whole or not at all. Two epochs are kept.
        epoch: Its number.
        model: ``engine.model``.
        optimizer: ``engine.optimizer``.
        lr_scheduler: Saved along.
        kwargs: Saved along: JSON values and tensors.
    """
    extra = {"lr_scheduler": None if lr_scheduler is None else lr_scheduler.state_dict(), **kwargs}
    save(file, epoch, **_session(model, optimizer), extra=extra)


def load_checkpoint(
    file: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    **kwargs: Any,
) -> int:
    """Continue from the newest complete checkpoint of a folder, or from ``folder/step-...``; returns its epoch.

    ``kwargs`` are taken and ignored: what fits loads whatever the layout.

    Raises:
        FileNotFoundError: There is none.
    """
    found: Any = Path(file)
    if not found.name.startswith("step-"):
        found = newest(file)
        if not found:
            raise FileNotFoundError(f"load_checkpoint({str(file)!r}): no complete checkpoint there")
    loaded = load(found, **_session(model, optimizer))
    if lr_scheduler is not None and loaded.extra and loaded.extra.get("lr_scheduler"):
        lr_scheduler.load_state_dict(loaded.extra["lr_scheduler"])
    return loaded.step


def broadcast_from_first(model: nn.Module, group: Any) -> None:
    """Give every rank of a group the first one's weights and buffers."""
    source = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.data
            dist.broadcast(local, source, group=group)
