"""Processes that are started once and run many cases."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing.connection
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.here import init_process_group
from tests.processes import fork_home, forks

_PATIENCE_S = 120


def _work(rank: int, size: int, folder: str, pipe: Any, searches: bool) -> None:
    torch.set_num_threads(1)
    if searches:
        fork_home()
    init_process_group(
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=_PATIENCE_S),
    )
    import warnings

    warnings.simplefilter("ignore")  # torch warns about its collectives; other tests show warnings
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            os._exit(0)
        if case is None:
            os._exit(0)  # gloo's teardown aborts now and then
        function, args = case
        try:
            torch.manual_seed(0)
            value = function(rank, size, *args)
            dist.barrier()
            pipe.send((True, value))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        sys.stdout.flush()


class World:
    """``size`` processes in one gloo group that run given functions.

    A failed case ends the processes, because their collectives may be out of step; the next case starts new ones.

    With ``searches``, measuring processes are forked from a copy of each process.
    """

    def __init__(self, size: int, searches: bool = False) -> None:
        self.size, self.patience_s, self._searches = size, _PATIENCE_S, searches
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: Any = None

    def _start(self) -> None:
        context = forks()
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, self.size, self._folder.name, theirs, self._searches), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(rank, size, *args)`` on every rank; return each rank's result.

        Raises:
            AssertionError: It failed on a rank; the message has that rank's traceback.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: list[Any] = [None] * self.size
        failed: list[str] = []
        waiting = dict(enumerate(self._pipes))
        while waiting and not failed:
            ready = multiprocessing.connection.wait(waiting.values(), timeout=self.patience_s)
            if not ready:
                failed.append(f"ranks {list(waiting)} have not answered in {self.patience_s:g} s")
            for rank, pipe in list(waiting.items()):
                if pipe in ready:
                    del waiting[rank]
                    try:
                        fine, answers[rank] = pipe.recv()
                    except (EOFError, ConnectionResetError):
                        fine, answers[rank] = False, "the process has ended"
                    if not fine:
                        failed.append(f"rank {rank}: {answers[rank]}")
        if failed:
            for (
                rank,
                pipe,
            ) in waiting.items():  # collect other ranks' errors; a hanging rank gets no more time
                if pipe.poll(2 if ready else 0):
                    with contextlib.suppress(EOFError, ConnectionResetError):
                        fine, answer = pipe.recv()
                        failed += [] if fine else [f"rank {rank}: {answer}"]
            self.close(kill=True)
            raise AssertionError("\n".join(failed))
        return answers

    def close(self, kill: bool = False) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kill:
                process.kill()
            else:
                with contextlib.suppress(OSError):
                    pipe.send(None)
            process.join(10)
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
