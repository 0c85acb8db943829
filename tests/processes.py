"""Start processes for tests as forks of one that has imported what they need."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from castwise.lab.timing import processes
from castwise.lab.timing.processes import Home
from castwise.lab.timing.served import serve
from tests.here import DEVICE


def forks() -> ForkServerContext:
    """Return a context whose processes start in 0.1 s, where an interpreter needs seconds to import torch.

    Its server only imports and forks, so it has no threads that a fork would lose.
    """
    if DEVICE == "cuda":
        pytest.skip("a fork cannot use CUDA")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.imports"])
    return context


def serve_forks() -> None:
    """Make the processes that :func:`forks` starts here be forks of a copy of this process, which has no threads yet."""

    def copy(_: bytes, command: Sequence[str], kept: Collection[int]) -> int:
        pid = os.fork()
        if pid == 0:
            for fd in set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2, *kept}:
                with contextlib.suppress(OSError):
                    os.close(fd)
            try:
                exec(command[-1], {})
            finally:
                os._exit(0)
        return pid

    forks()
    real, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, copy
    multiprocessing.forkserver.ensure_running()
    multiprocessing.util.spawnv_passfds = real


_SELF_ALONE = False


def _context() -> BaseContext:
    """Return the context that forks: the server, or, inside :func:`of_one`, this process itself, which has no threads."""
    return multiprocessing.get_context("fork") if _SELF_ALONE else forks()


def of_one(function: Callable[[Any], Any], argument: Any, folder: Path) -> None:
    """Run ``function(argument)`` in a process that forks its own children, so that slow imports happen once.

    The children have everything that its module or the function has imported before.
    """
    process = Forked(_as_one, (function, argument), folder, folder / "one")
    assert process.wait(240) == 0, process.said("err")


def _as_one(given: tuple[Callable[[Any], Any], Any]) -> None:
    global _SELF_ALONE
    _SELF_ALONE = True
    function, argument = given
    function(argument)


def _serve(there: socket.socket) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    serve("fork", there.detach())


@contextlib.contextmanager
def forked_home() -> Iterator[socket.socket]:
    """Yield a connection to the parent of a search's processes, like :meth:`Home.line`, but to a fork."""
    line, there = socket.socketpair()
    process = forks().Process(target=_serve, args=(there,))
    with there:
        process.start()
    with line:
        yield line
    process.join(10)
    process.kill()  # no effect if it has ended


def fork_home() -> None:
    """Make searches in this process measure in forks of a copy of it; it has imported torch and has no threads yet."""
    line, there = socket.socketpair()
    if os.fork() == 0:
        line.close()
        try:
            _serve(there)
        finally:
            os._exit(0)
    there.close()
    Home.line = lambda _: line.dup()  # type: ignore[method-assign]
    processes._end = socket.socket.close


def _enter(
    function: Callable[[Any], Any], argument: Any, folder: str, log: str, environment: Mapping[str, str]
) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore SIGINT
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    torch.set_num_threads(1)
    function(argument)


def run_script(words: list[str]) -> None:
    """Run a script with its arguments, as Python does."""
    sys.argv[:] = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


class Forked:
    """A process that runs ``function(argument)`` in a folder and prints into ``log.out`` and ``log.err``."""

    def __init__(
        self, function: Callable[[Any], Any], argument: Any, folder: Path, log: Path, **environment: str
    ) -> None:
        self._log = log
        self._process: BaseProcess = _context().Process(
            target=_enter, args=(function, argument, str(folder), str(log), environment)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def said(self, stream: str) -> str:
        """Return what it has printed to ``out`` or ``err``."""
        return Path(f"{self._log}.{stream}").read_text()

    def wait(self, timeout_s: float) -> int:
        """Wait for its end, kill it after the timeout, and return the exit code."""
        self._process.join(timeout_s)
        self.end()
        assert self.code is not None
        return self.code

    def end(self) -> None:
        """Kill it and all processes it has started, if it is still running."""
        if self._process.is_alive():
            for pid in [*started_by(self.pid), self.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.join()


def children_of(pid: int) -> list[int]:
    """Return the direct children of a process, on Linux."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def started_by(pid: int) -> list[int]:
    """Return all descendants of a process."""
    return [found for child in children_of(pid) for found in (child, *started_by(child))]


def run_ranks(function: Callable[[Any], Any], argument: Any, folder: Path, size: int) -> list[Forked]:
    """Run ``function(argument)`` in processes with torchrun's environment until they end; return the processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    ranks = [
        Forked(
            function, argument, folder, folder / f"rank{rank}", RANK=str(rank), LOCAL_RANK=str(rank), **environment
        )
        for rank in range(size)
    ]  # fmt: skip
    for rank in ranks:
        rank.wait(240)
    return ranks


def command(folder: Path, size: int, *words: str) -> list[Forked]:
    """Run ``castwise`` in processes with torchrun's environment until they end; return the processes."""
    from castwise.commands.cli import main

    return run_ranks(main, words, folder, size)
