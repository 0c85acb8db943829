"""Training runs in processes of their own, of which one runs while the others wait.

A plan that is timed beside others in one process shares their allocator, caches and threads, and a process is lucky or
unlucky for its whole life: where its memory lies can move the time of a step by more than many rounds can tell. So what
decides is measured as it will be run: each plan trains in a process that holds nothing else and is started anew several
times, and the spread between starts is part of the interval (:func:`castwise.measure.stats.restarted_speedup`).

Starting is cheap where the system forks safely: one process imports castwise, touches no device and starts no thread, and
is forked for each run. Elsewhere every run is an interpreter of its own. What a run is told and answers goes over a pipe;
it ends when its pipe closes, so none outlives the process that asked.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, Self

import torch

from castwise.errors import CastwiseError, WorkloadError, sentence
from castwise.measure.steps import TrainingRun
from castwise.measure.timing import WARMUP, synchronize
from castwise.plans.plan import Plan
from castwise.workload import Workload, find_workload

__all__ = ["Apart", "Home", "portable", "race_apart", "serve"]

_FORKS = sys.platform.startswith("linux")
BLOCK_S = 0.12
"""A block of steps lasts at least about this long, so that timers and the scheduler do not show."""
_PATIENCE_S = 5.0
_ENTRY = """
import ast, sys
sys.path[:] = ast.literal_eval(sys.argv[3])
from castwise.measure.apart import serve
serve(sys.argv[1], int(sys.argv[2]))
"""
_LAUNCHED = re.compile(
    r"(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|ROLE_NAME|ROLE_RANK|ROLE_WORLD_SIZE)$|(LOCAL|GROUP)_(RANK|WORLD_SIZE)$|TORCHELASTIC_"
)
"""What torchrun says to its processes: one that measures is none of the ranks."""


def portable(workload: Workload | str) -> bytes:
    """A workload, or how to find it, as bytes that another process can read; functions of scripts and lambdas included.

    Raises:
        WorkloadError: It holds what cannot leave this process, such as an open file or a generator.
    """
    import cloudpickle  # type: ignore[import-untyped]

    try:
        return bytes(cloudpickle.dumps(workload))
    except Exception as error:  # pickling runs code of whatever is pickled
        name = workload if isinstance(workload, str) else workload.name
        raise WorkloadError(
            f"workload {name!r} cannot be sent to another process ({type(error).__name__}: {sentence(error, whole=False)}); put it into a "
            "file and name it file.py:attribute"
        ) from error


class Home:
    """Where processes start that have imported castwise and done nothing else; a context manager."""

    def __enter__(self) -> Self:
        """Start the process that is forked, where there is one."""
        self._interpreters: list[subprocess.Popen[bytes]] = []
        self._line: socket.socket | None = None
        if _FORKS:
            self._line, there = socket.socketpair()
            with there:
                self._interpreter("fork", there.fileno())
        return self

    def __exit__(self, *exception: object) -> None:
        """End it, and wait for what is still up; their pipes are closed by then, or close with this process."""
        if self._line is not None:
            self._line.close()
        for process in self._interpreters:
            try:
                process.wait(timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, work: Callable[..., None], *args: Any) -> Connection:
        """Start ``work(pipe, *args)``, a function of a module, in a process of its own; the other end of its pipe."""
        here, there = Pipe()
        with there:
            if self._line is not None:
                socket.send_fds(self._line, [b"."], [there.fileno()])
            else:
                self._interpreter("run", there.fileno())
        here.send((os.getcwd(), torch.get_num_threads(), work, args))
        return here

    def _interpreter(self, what: str, fd: int) -> None:
        environment = {name: value for name, value in os.environ.items() if not _LAUNCHED.match(name)}
        command = [sys.executable, "-c", _ENTRY, what, str(fd), repr(sys.path)]
        self._interpreters.append(
            subprocess.Popen(
                command, pass_fds=(fd,), env=environment,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip


def serve(what: str, fd: int) -> None:
    """What a started interpreter does: run one thing, or be forked for each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked is interrupted, and closes the pipe
    if what == "run":
        _run(fd)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system takes away what has ended
    with socket.socket(fileno=fd) as line:
        while True:
            message, fds, _, _ = socket.recv_fds(line, 1, 1)
            if not message:
                return
            if os.fork() == 0:
                line.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    _run(fds[0])
                finally:
                    os._exit(0)
            os.close(fds[0])


def _run(fd: int) -> None:
    with Connection(fd) as pipe, contextlib.suppress(EOFError, BrokenPipeError):  # whoever asked has gone
        folder, threads, work, args = pipe.recv()
        os.chdir(folder)
        torch.set_num_threads(threads)
        work(pipe, *args)


# --- training ---------------------------------------------------------------------------------------------------


class Apart:
    """A :class:`TrainingRun` in a process of its own, which waits while it is not told to run.

    Args:
        home: Where it starts.
        workload: As :func:`portable` returns it.
        plan: What training runs by.
        device: Device that it runs on.
        seed: Of the weights and of the data.
        compile: Compile the prepared model by ``torch.compile``.

    Attributes:
        losses: Of the steps it has taken, once it is closed.
        step_s: Seconds of its last step of warming up, 0 before.
    """

    def __init__(
        self, home: Home, workload: bytes, plan: Plan, device: torch.device, seed: int, compile: bool = False
    ) -> None:
        self.losses: list[float] = []
        self.step_s = 0.0
        self._pipe = home.start(_train, workload, plan.to_json(), str(device), seed, compile)

    def ready(self) -> None:
        """Wait until the model is built.

        Raises:
            Exception: What building it raised there; CastwiseError where the process ended without a word.
        """
        self._answer()

    def steps(self, count: int) -> float:
        """Train for some steps; seconds that they took, by its own clock, waiting for the device included.

        Raises:
            Exception: What a step raised there; CastwiseError where the process ended without a word.
        """
        self._send(count)
        return float(self._answer())

    def warm_up(self) -> None:
        """Take the first steps, which build kernels and optimizer state; ``step_s`` is then the last one's seconds."""
        for _ in range(WARMUP):
            self.step_s = self.steps(1)

    def close(self) -> None:
        """End the process; does nothing to one that has ended."""
        with contextlib.suppress(Exception):  # one that failed has no losses to tell
            self._send(None)
            self.losses = self._answer()
        self._pipe.close()

    def _send(self, message: int | None) -> None:
        with contextlib.suppress(BrokenPipeError):  # the answer says so
            self._pipe.send(message)

    def _answer(self) -> Any:
        try:
            said, value = self._pipe.recv()
        except (EOFError, OSError):
            raise CastwiseError("the process ended without a word; out of memory?") from None
        if said == "failed":
            raise pickle.loads(value)
        return value


def race_apart(
    home: Home,
    workload: bytes,
    plans: Sequence[Plan],
    device: torch.device,
    *,
    rounds: int,
    seed: int = 0,
    compile: bool = False,
    on_round: Callable[[int], None] = lambda _done: None,
) -> list[list[float] | Exception]:
    """Start a training of each plan in a process of its own, and time them in turns.

    Args:
        home: Where they start.
        workload: As :func:`portable` returns it.
        plans: What they train by; the same plan may come more than once.
        device: Device that all run on.
        rounds: In each of which every one runs a block of steps, the order turning from round to round.
        seed: Of weights and data.
        compile: Compile the prepared models.
        on_round: Called with the number of rounds that are done.

    Returns:
        By plan seconds per step, by round; or why it failed.
    """
    with contextlib.ExitStack() as stack:
        runs = [Apart(home, workload, plan, device, seed, compile) for plan in plans]
        for run in runs:
            stack.callback(run.close)
        out: list[list[float] | Exception] = [[] for _ in runs]

        def each(work: Callable[[Apart], None], order: Iterable[int]) -> None:
            for index in order:
                if not isinstance(out[index], Exception):
                    try:
                        work(runs[index])
                    except Exception as error:
                        out[index] = error

        each(Apart.ready, range(len(runs)))
        each(Apart.warm_up, range(len(runs)))
        fastest = min((run.step_s for run in runs if run.step_s), default=BLOCK_S)
        block = max(1, min(64, round(BLOCK_S / fastest)))
        for number in range(rounds):
            order = [(number + turn) % len(runs) for turn in range(len(runs))]

            def timed(run: Apart) -> None:
                out[runs.index(run)].append(run.steps(block) / block)  # type: ignore[union-attr]

            each(timed, order if number % 2 == 0 else reversed(order))
            on_round(number + 1)
        return out


def _train(pipe: Connection, workload: bytes, plan: str, device: str, seed: int, compile: bool) -> None:
    where = torch.device(device)
    try:
        found = pickle.loads(workload)
        found = find_workload(found) if isinstance(found, str) else found
        run = TrainingRun(found, Plan.from_json(plan), where, seed, compile=compile)
        pipe.send(("done", None))
        while (count := pipe.recv()) is not None:
            pipe.send(("done", _seconds(run, count, where)))
        pipe.send(("done", run.losses))
    except (EOFError, BrokenPipeError):
        raise
    except Exception as error:
        pipe.send(("failed", _pickled(error)))


def _seconds(run: TrainingRun, steps: int, device: torch.device) -> float:
    try:
        run.before(steps)
        synchronize(device)
        start = time.perf_counter()
        run.run(steps)
        synchronize(device)
        return time.perf_counter() - start
    finally:
        run.after()


def _pickled(error: Exception) -> bytes:
    """An exception as bytes that become one again; in words where it would not."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # exceptions with arguments of their own pickle, and fail when they are made again
        data = pickle.dumps(CastwiseError(f"{type(error).__name__}: {error}"))
    return data
