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

from castwise.casting import default_device_type
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
        torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")
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
    """Say how much memory of the device is and was in use, on the first rank; on a CPU the process's largest size.

    Args:
        message: What to begin with.
        logger: Where to; by default it is printed.
        report_cpu: Add the process's largest size on an accelerator too.
    """
    parts = []
    if get_current_device().type == "cuda":
        parts = [
            f"{name} {read() / 2**20:.1f} MiB"
            for name, read in (
                ("allocated", torch.cuda.memory_allocated),
                ("max allocated", torch.cuda.max_memory_allocated),
                ("reserved", torch.cuda.memory_reserved),
                ("max reserved", torch.cuda.max_memory_reserved),
            )
        ]
    if report_cpu or not parts:
        import resource

        parts.append(f"process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.1f} MiB at most")
    print_rank_0(f"{message}: {', '.join(parts)}", logger)


# --- data -----------------------------------------------------------------------------------------------------


class DataParallelSampler(DistributedSampler[Any]):
    """Gives each data parallel rank its part, in a new order each time it is gone through.

    Args:
        dataset: Of known length.
        shuffle: Draw an order, the same on all ranks.
        seed: Of the order.
        drop_last: Leave out what does not divide; else it is filled up from the beginning.
    """

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
    """A loader whose data parallel ranks read different parts.

    Args:
        dataset: What to load.
        shuffle: Draw an order each epoch.
        seed: Of the order and of the workers.
        add_sampler: Divide the data over the data parallel ranks where there is more than one.
        drop_last: Leave out an incomplete batch.
        pin_memory: Only where there is an accelerator.
        num_workers: Processes that load.
        kwargs: As in ``torch.utils.data.DataLoader``, ``batch_size`` above all.

    Returns:
        The loader.
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
        """End; waits for the device.

        Args:
            keep_in_history: Remember the interval.

        Returns:
            Its length in seconds.
        """
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
    """Timers by name.

    Args:
        on: False makes every call do nothing.
    """

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


def _session(model: nn.Module) -> Any:
    from castwise import Amp

    inner = (
        getattr(model, "module", model) if isinstance(model, nn.parallel.DistributedDataParallel) else model
    )
    parts = list(inner) if isinstance(inner, nn.ModuleList) and Amp.of(inner) is None else [inner]
    amp = Amp.of(parts[0])
    if amp is None:
        raise StateError(
            "save_checkpoint and load_checkpoint take the model of an engine (engine.model): this one was not prepared by "
            "colossalai.initialize or convert_to_amp"
        )
    return amp, parts[0] if len(parts) == 1 else parts


def save_checkpoint(
    file: str | os.PathLike[str],
    epoch: int,
    model: nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    **kwargs: Any,
) -> None:
    """Save a training into a folder, from all ranks, so that it resumes under any mode and layout.

    Args:
        file: A folder; a checkpoint of castwise appears in it whole or not at all. Two epochs are kept.
        epoch: Its number.
        model: The engine's.
        optimizer: The engine's.
        lr_scheduler: Saved along.
        kwargs: Saved along, JSON values and tensors.
    """
    from castwise import checkpoint

    amp, parts = _session(model)
    extra = {"lr_scheduler": None if lr_scheduler is None else lr_scheduler.state_dict(), **kwargs}
    optimizers = () if optimizer is None else getattr(optimizer, "optimizer", optimizer)
    checkpoint.save(file, epoch, model=parts, optimizers=optimizers, amp=amp, extra=extra)


def load_checkpoint(
    file: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    **kwargs: Any,
) -> int:
    """Continue from the newest complete checkpoint of a folder, or from one of them.

    Args:
        file: The folder, or ``folder/step-...`` for a certain one.
        model: The engine's.
        optimizer: The engine's.
        lr_scheduler: Loaded along.
        kwargs: Taken and ignored: what fits loads whatever the layout.

    Returns:
        The number of its epoch.

    Raises:
        FileNotFoundError: There is none.
    """
    from castwise import checkpoint

    amp, parts = _session(model)
    path = Path(file)
    if not path.name.startswith("step-"):
        found = checkpoint.newest(path)
        if not found:
            raise FileNotFoundError(f"load_checkpoint({str(file)!r}): no complete checkpoint there")
        path = found.path or path
    optimizers = () if optimizer is None else getattr(optimizer, "optimizer", optimizer)
    loaded = checkpoint.load(path, model=parts, optimizers=optimizers, amp=amp)
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
