"""Measure the peak memory of a training step and of inference, for each plan in its own process.

On a CPU, the bytes held by torch's allocator are counted with torch's profiler. Equal runs then give equal numbers to the byte,
whereas the resident size of a process (``VmHWM`` of ``/proc/self/status``) varies between equal runs. Memory that libraries
allocate outside torch is not included. On an accelerator, the peak is ``max_memory_allocated`` after a reset of the peak statistics.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from castwise.core import devices
from castwise.core.plans.plan import Plan
from castwise.errors import CastwiseError, WorkloadError, told
from castwise.lab.timing.processes import FORKS, Home, Process, delivered, received
from castwise.lab.timing.runners import InferenceRun, TrainingRun
from castwise.lab.timing.served import belong_to
from castwise.lab.timing.timing import synchronize
from castwise.lab.workloads.workload import Workload

_MARK = "castwise::peak"
_WARMUP = 2
"""Number of steps before the measured step: after the first, optimizer state exists and casts are cached."""


@dataclass(frozen=True)
class Memory:
    """The memory that a workload needs under a plan, in bytes.

    Attributes:
        training_peak_bytes: Maximum allocated during one training step: weights, masters,
            gradients, optimizer state, activations and the batch.
        inference_peak_bytes: Maximum allocated during one inference call, without anything that only training needs.
        saved_bytes: Size of the storages that autograd keeps for the backward pass, without those of parameters and buffers.
        method: The method of measurement.
    """

    training_peak_bytes: int | None
    inference_peak_bytes: int | None
    saved_bytes: int | None
    method: str


def measure_memory(
    workload: Workload | str,
    plan: Plan,
    device: torch.device,
    *,
    seed: int = 0,
    training: bool = True,
    inference: bool = True,
    home: Home | None = None,
) -> Memory:
    """Measure a plan's memory in a new process; ``home.patience_s`` limits how long this process waits.

    Some workloads cannot be sent to another process, because they hold a lock, an open file, or a module that only this process
    has. Such a workload is measured in a fork of this process, if the operating system and the device allow it.

    Args:
        workload: A workload, or a name that :func:`castwise.lab.workloads.workload.find_workload` finds in the new process.
        plan: The plan to run under.
        device: The device to run on.
        seed: Seed of weights and data.
        training: Whether to measure a training step.
        inference: Whether to measure inference.
        home: Starts the process; by default a new :class:`~castwise.lab.timing.processes.Home`.

    Raises:
        CastwiseError: The workload cannot be sent, or the process failed; the message says why.
    """
    try:
        with Home() if home is None else contextlib.nullcontext(home) as folder:
            process = _start(folder, workload, plan, device, seed, training, inference)
            try:
                found: Memory = process.answer()
            finally:
                process.close()
    except Exception as error:
        raise CastwiseError(f"memory was not measured: {told(error, whole=False)}") from error
    return found


def _start(
    home: Home, workload: Workload | str, plan: Plan, device: torch.device, seed: int, *what: bool
) -> Process:
    try:
        sent = delivered(home, workload)
    except WorkloadError:
        if isinstance(workload, str) or device.type != "cpu" or not FORKS:
            raise
        return home.fork(_measure_in_copy, workload, plan, device, seed, *what)
    return home.start(_measure, sent, plan.to_json(), str(device), seed, *what)


def _measure_in_copy(*what: Any) -> Memory:
    found = measure_here(*what)
    return replace(found, method=f"{found.method}, one thread")


def _measure(_pipe: Connection, workload: bytes, plan: str, device: str, seed: int, *what: bool) -> Memory:
    made = Plan.from_json(plan)
    belong_to(made)
    return measure_here(received(workload), made, torch.device(device), seed, *what)


def measure_here(
    workload: Workload,
    plan: Plan,
    device: torch.device,
    seed: int,
    training: bool = True,
    inference: bool = True,
) -> Memory:
    """Measure a plan's memory in this process, which should hold nothing else."""
    trained = saved_bytes = None
    if training:
        trained = peak_bytes(lambda: TrainingRun(workload, plan, device, seed), device)
    called = peak_bytes(lambda: InferenceRun(workload, plan, device, seed), device) if inference else None
    if training:
        with (
            contextlib.closing(TrainingRun(workload, plan, device, seed)) as run,
            count_saved_bytes(run.model) as saved,
        ):
            run.block(1)
        saved_bytes = saved.total_bytes
    method = "bytes held by torch's allocator" if device.type == "cpu" else "max_memory_allocated"
    return Memory(trained, called, saved_bytes, method)


def peak_bytes(build: Callable[[], TrainingRun | InferenceRun], device: torch.device) -> int | None:
    """Return the maximum number of allocated bytes during one step, after warm-up steps; None if the device does not report it.

    The number includes what the runner that ``build`` makes allocates and keeps, such as weights.
    """
    gc.collect()
    if device.type == "cpu":
        return _cpu_peak_bytes(build)
    statistics = devices.memory_statistics(device)
    if statistics is None:
        return None
    devices.empty_cache(device)
    before = int(statistics.memory_allocated(device))
    with contextlib.closing(build()) as run:
        run.block(_WARMUP)
        gc.collect()
        synchronize(device)
        statistics.reset_peak_memory_stats(device)
        run.block(1)
        synchronize(device)
        return int(statistics.max_memory_allocated(device)) - before


def _cpu_peak_bytes(build: Callable[[], TrainingRun | InferenceRun]) -> int:
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run = build()
        run.block(_WARMUP)
        gc.collect()
        run.before(1)
        try:
            with record_function(_MARK):
                run.run(1)
        finally:
            run.after()
        # freed while the profiler runs, since its count of allocated bytes persists
        run.close()
        del run
        gc.collect()
    with tempfile.TemporaryDirectory(prefix="castwise-") as folder:
        trace = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(trace)
        with open(trace, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    return _peak_of_marked_step(events)


def _peak_of_marked_step(events: list[dict[str, Any]]) -> int:
    """Return the maximum of the allocator's total of bytes during the marked step of a profiler trace.

    Blocks that were allocated earlier in the trace are part of the total. The initial count, which is left over from an earlier
    trace in this process, is not.
    """
    step = next(e for e in events if e.get("name") == _MARK and e.get("ph") == "X")
    start, end = step["ts"], step["ts"] + step["dur"]
    memory = [e for e in events if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0]
    memory.sort(key=lambda event: event["ts"])
    totals = [(event["ts"], event["args"]["Total Allocated"]) for event in memory]
    before = totals[0][1] - memory[0]["args"]["Bytes"]
    held = [total for ts, total in totals if ts < start][-1:]
    return int(max([*held, *(total for ts, total in totals if start <= ts <= end)])) - int(before)


class _Saved:
    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    @property
    def total_bytes(self) -> int:
        """The total number of bytes of the saved storages, each counted once."""
        return sum(storage.nbytes() for storage in self.storages.values())


@contextlib.contextmanager
def count_saved_bytes(model: nn.Module) -> Iterator[_Saved]:
    """Count the bytes that autograd saves for the backward pass of the code inside the block.

    The block gets an object whose ``total_bytes`` is the count. A storage that several operators save is counted once. Storages of
    the model's parameters and buffers are not counted. Casts of weights to a lower format are counted, since training needs that
    memory. Counted storages stay allocated until the block ends, so peak memory should be measured elsewhere.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved = _Saved()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved.storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
