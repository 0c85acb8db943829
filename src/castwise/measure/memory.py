"""Peak memory of a training step and of inference, each plan in a process of its own.

On a CPU the bytes that torch's allocator holds are counted, from torch's profiler: the same run gives the same
number to the byte, where the resident size of a process (``VmHWM`` of ``/proc/self/status``) moved by 7 MB
between runs that differ by nothing, for a network whose tensors take 31 MB. What libraries allocate behind torch's
back is not in it. On an accelerator it is ``max_memory_allocated`` with its peak reset.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from castwise.errors import CastwiseError, WorkloadError
from castwise.measure.steps import InferenceRun, TrainingRun
from castwise.measure.timing import synchronize
from castwise.plans.plan import Plan
from castwise.workload import Workload, find_workload

TIMEOUT_S = 900.0
_MARK = "castwise::peak"
_WARMUP = 2
"""Steps before the one that is measured: optimizer state exists after the first, casts are cached after it."""


@dataclass(frozen=True)
class Memory:
    """Memory of a workload under a plan, all in bytes.

    Attributes:
        training_peak_bytes: Most that was allocated at once during one training step: weights, masters,
            gradients, optimizer state, activations and the batch.
        inference_peak_bytes: The same during one inference call, without anything training needs.
        saved_bytes: Storages kept for the backward pass that are neither parameters nor buffers.
        method: How the peaks were found.
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
    inference: bool = True,
) -> Memory:
    """Measure a plan's memory in a new process, which is ended after ``TIMEOUT_S`` seconds.

    A workload that cannot be pickled (it holds lambdas or functions of the script itself) is measured in a fork of this
    process, where the operating system and the device allow it. A specification is one that
    :func:`castwise.workload.find_workload` takes.

    Raises:
        CastwiseError: The process could not be started or failed; the message says why.
    """
    with tempfile.TemporaryDirectory(prefix="castwise-") as folder:
        answer = Path(folder) / "memory.json"
        request = _pickle(workload, plan, device, seed, inference)
        if request is None and isinstance(workload, Workload):
            measure = partial(measure_here, workload, plan, device, seed, inference)
            _in_fork(partial(_answer, answer, measure), device)
            forked = _read(answer, "")
            return replace(forked, method=f"{forked.method}, one thread")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "castwise.measure", str(answer)], env=_alone(os.environ),
                input=pickle.dumps((sys.path, torch.get_num_threads(), request)), capture_output=True, timeout=TIMEOUT_S,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CastwiseError(f"memory was not measured: no answer after {TIMEOUT_S:g} s") from None
        return _read(answer, done.stderr.decode(errors="replace"))


def main(answer: str) -> None:
    """Entry point of the process: a request on standard input, the answer into a file of this path."""
    sys.path[:], threads, request = pickle.load(sys.stdin.buffer)

    def measure() -> Memory:
        torch.set_num_threads(threads)
        workload, *others = pickle.loads(request)  # imports what the workload is made of
        return measure_here(find_workload(workload) if isinstance(workload, str) else workload, *others)

    _answer(Path(answer), measure)


def measure_here(workload: Workload, plan: Plan, device: torch.device, seed: int, inference: bool) -> Memory:
    """Measure a plan's memory in this process, which should hold nothing else."""
    training = peak_bytes(lambda: TrainingRun(workload, plan, device, seed), device)
    called = peak_bytes(lambda: InferenceRun(workload, plan, device, seed), device) if inference else None
    with (
        contextlib.closing(TrainingRun(workload, plan, device, seed)) as run,
        count_saved_bytes(run.model) as saved,
    ):
        run.block(1)
    method = "bytes held by torch's allocator" if device.type == "cpu" else "max_memory_allocated"
    return Memory(training, called, saved.total_bytes, method)


def peak_bytes(build: Callable[[], TrainingRun | InferenceRun], device: torch.device) -> int | None:
    """Most bytes allocated at once during one step, after others that warm it up; None where the device does not tell.

    What the runner that ``build`` makes allocates and keeps is counted.
    """
    gc.collect()
    if device.type == "cpu":
        return _cpu_peak_bytes(build)
    try:
        torch.accelerator.empty_cache()
        before = torch.accelerator.memory_allocated(device)
    except (RuntimeError, NotImplementedError):  # MPS keeps no such statistics
        return None
    with contextlib.closing(build()) as run:
        run.block(_WARMUP)
        gc.collect()
        synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        run.block(1)
        synchronize(device)
        return int(torch.accelerator.max_memory_allocated(device)) - before


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
        # freed while the profiler looks on: its count of what is held outlives it
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
    """The largest total of the allocator's events inside the marked step of a trace.

    Blocks from before the step are part of the total, since the trace saw them too; what the count began with,
    left over from an earlier trace in this process, is not.
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
        """Bytes of the distinct storages."""
        return sum(storage.nbytes() for storage in self.storages.values())


@contextlib.contextmanager
def count_saved_bytes(model: nn.Module) -> Iterator[_Saved]:
    """Count what autograd keeps for the backward pass of the code inside, as ``total_bytes`` of what is yielded.

    A storage that several operators save is counted once, and those of the model's parameters and buffers not at
    all. Casts of weights to a lower format are counted: they are memory that training needs. The storages stay
    alive until the block ends, so peaks should be measured elsewhere.
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


_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
"""What torchrun says to its processes, beside names that begin with LOCAL_, GROUP_ or TORCHELASTIC_."""


def _alone(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what makes a process one of torchrun's: the one that measures is none of the ranks."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _LAUNCHED and not re.match(r"(LOCAL|GROUP)_(RANK|WORLD_SIZE)$|TORCHELASTIC_", name)
    }


def _pickle(workload: Workload | str, *others: object) -> bytes | None:
    """A workload, and what goes with it, for another process; None where it would not be found there."""
    try:
        pickled = pickle.dumps((workload, *others))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return None if b"__main__" in pickled and not isinstance(workload, str) else pickled


def _in_fork(work: Callable[[], None], device: torch.device) -> None:
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        raise WorkloadError(
            "memory was not measured: the workload holds functions that cannot be sent to another process; "
            "put it into a file and name it file.py:attribute"
        )
    child = os.fork()
    if child == 0:
        try:
            gc.freeze()  # a process group among what the parent has left behind would wait for threads that stayed there
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler talks on standard error
            # torch's threads do not survive a fork; with one thread none is needed, as in DataLoader's workers
            torch.set_num_threads(1)
            for name in set(os.environ) - set(_alone(os.environ)):
                del os.environ[name]
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _answer(path: Path, measure: Callable[[], Memory]) -> None:
    """Write what was measured, or why it was not."""
    try:
        answer = asdict(measure())
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    path.write_text(json.dumps(answer), encoding="utf-8")


def _read(path: Path, stderr: str) -> Memory:
    if not path.exists():
        last = stderr.strip().splitlines()[-1:] or ["it died without a word (out of memory?)"]
        raise CastwiseError(f"memory was not measured: the process ended with: {last[0]}")
    answer = json.loads(path.read_text(encoding="utf-8"))
    if "error" in answer:
        raise CastwiseError(f"memory was not measured: {answer['error']}")
    return Memory(**answer)
