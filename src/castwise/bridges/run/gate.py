"""The part of ``castwise try`` that runs inside the script's process, and pauses the script before each block of steps."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from castwise.bridges.run.follow import Follower
from castwise.core import _torch, devices
from castwise.lab.timing.timing import synchronize

ADDRESS = "CASTWISE_TRY"
"""The environment variable that tells a script's process the file descriptor of its pipe to ``castwise try``."""


class EnoughError(BaseException):
    """Raised when the script has made all requested steps. It is no ``Exception``, since scripts may catch exceptions."""


class Block(NamedTuple):
    """What a script reports after a block of steps.

    Attributes:
        seconds: The time per step, measured in the script's process, including everything between two steps.
        losses: The loss of each step, which is the scalar that backward started from. None if backward started from
            something else.
        peak_bytes: The peak memory so far: the process's or, on a CUDA device, the memory that torch allocated.
        skipped: Number of steps skipped so far because gradients were not finite.
    """

    seconds: float
    losses: list[float | None]
    peak_bytes: int
    skipped: int


class Note(NamedTuple):
    """A message about the script for the user."""

    text: str


@dataclass(frozen=True)
class Missing:
    """A message that the script ended because a file was missing."""


class Gate:
    """Pauses a script after each block of optimizer steps, and reports the time of the block to ``castwise try``.

    If the script has several optimizers, only the steps of the optimizer that steps first are counted.

    Args:
        pipe: The connection to the parent process, which sends the number of steps of the next block.
        follower: The :class:`Follower` that makes the script train under a plan. Its messages are sent through the pipe.
    """

    def __init__(self, pipe: Connection, follower: Follower) -> None:
        self._pipe = pipe
        self._follower = follower
        follower.say = lambda text: self._tell(Note(text))
        self._first: weakref.ref[Optimizer] | None = None
        self._left = self._count = 1
        self._loss: torch.Tensor | None = None
        self._losses: list[torch.Tensor | None] = []
        self._device = torch.device("cpu")
        self._since = time.perf_counter()

    @classmethod
    def of_this_process(cls, follower: Follower) -> Gate | None:
        """Return a gate for this process, or None if ``castwise try`` did not start the process."""
        handle = os.environ.pop(ADDRESS, None)
        return None if handle is None else cls(Connection(int(handle)), follower)

    def end(self, error: BaseException | None) -> None:
        """Report to ``castwise try`` if the script ended because a file was missing.

        The causes of ``error`` are searched for a FileNotFoundError.
        """
        while error is not None and not isinstance(error, FileNotFoundError):
            error = error.__cause__ or error.__context__
        if error is not None:
            self._tell(Missing())

    def _tell(self, what: Note | Missing) -> None:
        with contextlib.suppress(OSError):  # the parent process has closed the pipe
            self._pipe.send(what)

    def begin(self) -> None:
        """Start to pause the script, for the first time at the end of its first step."""
        _torch.autograd.around_backward(self._note)
        _torch.steps.subscribe(after=self._stepped)

    def _note(self, call: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _torch.autograd.graph_task_id() == -1 and len(outputs) == 1 and outputs[0].numel() == 1:
            self._loss = outputs[0].detach()
        return call(outputs, *args, **kwargs)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._first is None:
            self._first = weakref.ref(optimizer)
            self._device = next(p.device for group in optimizer.param_groups for p in group["params"])
        if self._first() is not optimizer:
            return
        self._losses.append(self._loss)
        self._left -= 1
        if self._left > 0:
            return
        if self._left < 0:
            os._exit(0)  # the script caught the error that should end it
        synchronize(self._device)
        seconds = (time.perf_counter() - self._since) / self._count
        losses = [None if loss is None else float(loss) for loss in self._losses]
        self._left = 0
        with contextlib.suppress(OSError, EOFError):  # the parent process is gone
            self._pipe.send(Block(seconds, losses, self._peak_bytes(), self._follower.skipped_steps))
            self._left = self._count = self._pipe.recv()
        self._losses.clear()
        if not self._left:
            raise EnoughError
        self._since = time.perf_counter()

    def _peak_bytes(self) -> int:
        if self._device.type != "cpu" and (statistics := devices.memory_statistics(self._device)):
            return int(statistics.max_memory_allocated(self._device))
        return peak_of_process()


def peak_of_process() -> int:
    """Return the peak memory of this process in bytes.

    The peak is read from ``/proc`` if that exists, since ``getrusage`` includes the parent's memory at the fork.
    """
    status = Path("/proc/self/status")
    if status.exists() and "VmHWM:" in (text := status.read_text()):
        return int(text.split("VmHWM:")[1].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
