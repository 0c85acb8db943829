"""Processes that measure: each holds nothing but what it measures, under the settings of the process that asks for it.

Starting one is cheap where the system forks safely: one process imports castwise, touches no device and starts no thread, and
is forked for each that is asked for. Elsewhere each is an interpreter of its own. Commands and answers go over a
pipe. A process that is no longer waited for is ended, with all that it started but what left its process group: none outlives the one
that asked, and none that hangs holds it up for longer than its patience. The libraries that the first of them imported for a workload are imported once
for all that follow (:meth:`Home.import_once`).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, Self

import torch

from castwise.core.extras import install
from castwise.core.session.process import settings
from castwise.errors import CastwiseError, Elsewhere, WorkloadError, sentence, told
from castwise.lab.timing.served import FORK, IMPORT, tried
from castwise.lab.workloads.workload import Workload, find_workload

FORKS = sys.platform.startswith("linux")
"""Whether the system forks safely."""
_RECEIVED_S = 60.0
"""Seconds after which a workload that has not arrived in a process is given up."""
PATIENCE_S = 600.0
"""Seconds of silence after which a process counts as hanging, unless a caller knows how long its work takes."""
HURRY = 0.1
"""Share of its patience that is left after one that hangs."""
_STARTS_S = 60.0
"""Seconds after which a forked process that has not started is given up."""
_ENDS_S = 5.0
"""Seconds that a process has to end, or to say who it is, once it was told to."""
_ENTRY = """
import ast, sys
sys.path[:] = ast.literal_eval(sys.argv[3])
from castwise.lab.timing.served import serve
serve(sys.argv[1], int(sys.argv[2]))
"""
_LAUNCHED = re.compile(
    r"(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|ROLE_NAME|ROLE_RANK|ROLE_WORLD_SIZE)$|(LOCAL|GROUP)_(RANK|WORLD_SIZE)$|TORCHELASTIC_"
)
"""What torchrun says to its processes: one that measures is none of the ranks."""

_IMPORT_S = 10.0
"""What takes longer to import is left to each process."""


class SilentError(CastwiseError):
    """A process that has not answered in time: it hangs, or is far slower than its time allows."""


class NotThereError(WorkloadError):
    """A workload that cannot leave this process, or does not run in another."""


def portable(workload: Workload | str) -> bytes:
    """A workload, or how to find it, as bytes for another process; functions of scripts and lambdas too, by cloudpickle.

    Raises:
        NotThereError: It holds what cannot leave this process, such as a lock or a generator.
    """
    try:
        return _dumps(workload)
    except Exception as error:  # pickling runs code of whatever is pickled
        name = workload if isinstance(workload, str) else workload.name
        raise NotThereError(
            f"workload {name!r} cannot be sent to another process ({sentence(error, whole=False)}); put it into a "
            f"file and name it file.py:attribute{_or_install()}"
        ) from error


def _dumps(workload: Workload | str) -> bytes:
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle.dumps(workload)  # what a script defines can then not leave it
    return bytes(cloudpickle.dumps(workload))


def _or_install() -> str:
    """What else sends to another process what cannot be named there."""
    if importlib.util.find_spec("cloudpickle") is not None:
        return ""
    return f", or let cloudpickle send it: {install('cloudpickle')}"


def received(workload: bytes) -> Workload:
    """What :func:`portable` sent, in the other process."""
    found = pickle.loads(workload)
    return find_workload(found) if isinstance(found, str) else found


def delivered(home: Home, workload: Workload | str) -> bytes:
    """What :func:`portable` sends, of which a process of a home has made the workload again.

    Raises:
        NotThereError: It cannot leave this process, or cannot be made again in another: it needs a module that only this one
            has, or what was set here after the start.
    """
    sent = portable(workload)
    mark = hashlib.sha256(sent).digest()
    if mark not in home.delivered:
        try:
            with contextlib.closing(home.start(_receive, sent)) as process:
                process.answer(_RECEIVED_S)
        except Exception as error:  # receiving runs code of the user's
            raise not_there(workload, error) from error
        home.delivered.add(mark)
    return sent


def _nothing(_pipe: Connection) -> None: ...


def _receive(_pipe: Connection, sent: bytes) -> None:
    received(sent)


def not_there(workload: Workload | str, error: Exception) -> NotThereError:
    """What to say of a workload that does not run in another process."""
    name = workload if isinstance(workload, str) else workload.name
    if isinstance(error, SilentError):
        return NotThereError(f"workload {name!r} hangs in another process: {error}")
    advice = f"; put all that it needs into a file and name it file.py:attribute{_or_install()}"
    return NotThereError(
        f"workload {name!r} does not run in another process ({told(error, whole=False)}){advice * (name is not workload)}"
    )


class Process:
    """One process, as the one that asked for it sees it.

    Args:
        pipe: To it. Where it leads a group of its own, the first that comes over it is the group's id.
        home: Where it was started.
        leads: Whether it leads a group.

    Attributes:
        at_work: Whether it owes an answer.
    """

    def __init__(self, pipe: Connection, home: Home, leads: bool = True) -> None:
        self._pipe, self._home, self._leads = pipe, home, leads
        self._group = 0
        self._asked = time.monotonic()
        self.at_work = True

    def send(self, message: object) -> None:
        """Tell it something, which it owes an answer to; to one that has ended, nothing: the answer says so."""
        self._asked, self.at_work = time.monotonic(), True
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(message)

    def answer(self, timeout_s: float | None = None) -> Any:
        """Wait for what it returns; for ``timeout_s`` seconds after it was asked, or as long as its home has patience.

        Raises:
            Exception: What was raised there, in words where that exception cannot travel; :func:`castwise.errors.place` says
                where in the user's code.
            CastwiseError: It ended without a word, or said nothing in time; the latter is ended when it is closed.
        """
        try:
            if self._leads and not self._group:
                self._group = self._next(timeout_s)
            failed, value = self._next(timeout_s)
        except (EOFError, ConnectionError):
            self.at_work = False
            raise CastwiseError("the process died without a word (out of memory?)") from None
        self.at_work = False
        if failed:
            error, trace, where = value
            raise pickle.loads(error) from Elsewhere(trace, where)
        return value

    def _next(self, timeout_s: float | None) -> Any:
        left_s = self._asked + (self._home.patience_s if timeout_s is None else timeout_s) - time.monotonic()
        if not self._pipe.poll(max(0.0, left_s) if math.isfinite(left_s) else None):
            if timeout_s is None:
                self._home.has_seen_silence()
            raise SilentError(f"no answer after {time.monotonic() - self._asked:.0f} s")
        return self._pipe.recv()

    def close(self, gone_s: float = 0.0) -> None:
        """Let go of it, and end what is left of it and of what it started; waits at most so long until they have. Once."""
        with contextlib.suppress(EOFError, ConnectionError):
            if self._leads and not self._group and self._pipe.poll(_ENDS_S):
                self._group = self._pipe.recv()
        self._pipe.close()
        group, self._group, self._leads = self._group, 0, False
        until = time.monotonic() + gone_s
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while group:
                os.killpg(group, signal.SIGKILL)
                if time.monotonic() >= until:
                    break
                time.sleep(0.01)


class Home:
    """Where processes start that have imported castwise and done nothing else; a context manager, left empty at its end.

    Attributes:
        delivered: Digests of workloads that a process from here has made again.
        patience_s: How long an answer of its processes may take, in seconds from when it was asked for; after one that hangs
            it is a tenth of that, since the others mostly hang for the same reason.
    """

    def __init__(self) -> None:
        self.delivered: set[bytes] = set()
        self.patience_s = PATIENCE_S
        self._silent = self._asked = False
        self._imported: set[str] | None = set()
        self._importing: tuple[socket.socket, Connection] | None = None
        self._interpreters: list[subprocess.Popen[bytes]] = []
        self._copies: list[int] = []
        self._line: socket.socket | None = None

    def __enter__(self) -> Self:
        """The process that is forked starts when the first is asked for."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End it, and wait for what it was asked for; pipes are closed by then, or close with this process."""
        self._take_imported(0.0)
        if self._line is not None:
            _end(self._line)
            self._line = None
        while self._interpreters:
            process = self._interpreters.pop()
            if not self._asked:  # it may still be about to begin
                process.kill()
            try:
                process.wait(timeout=_ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        while self._copies:
            pid = self._copies.pop()
            os.kill(pid, signal.SIGKILL)  # it has answered, or nobody waits for its answer
            os.waitpid(pid, 0)

    def start(self, work: Callable[..., Any], *args: Any) -> Process:
        """Start ``work(pipe, *args)``, a function of a module, in a process; what it returns or raises is its last answer.

        Raises:
            CastwiseError: No process can be started.
        """
        here, there = Pipe()
        self._asked = True
        self._take_imported()
        try:
            with there:
                if FORKS:
                    if self._line is None:
                        self._line = self.line()
                    socket.send_fds(self._line, [FORK], [there.fileno()])
                else:
                    self._interpreter("run", there.fileno())
        except OSError as error:
            raise CastwiseError(f"no process to measure in could be started ({sentence(error)})") from error
        process = Process(here, self)
        process.send((os.getcwd(), _path(), _environment(), settings(), work, args))
        return process

    def has_seen_silence(self) -> None:
        """Have less patience from now on."""
        if not self._silent:
            self._silent = True
            self.patience_s *= HURRY

    def begin(self) -> None:
        """Have the process that is forked start while this one goes on; where it cannot, :meth:`start` says so."""
        if FORKS and self._line is None:
            with contextlib.suppress(Exception):
                self._line = self.line()

    def import_soon(self, modules: Sequence[str]) -> None:
        """:meth:`import_once`, which :meth:`start` waits for."""
        self._take_imported()
        if self._line is None or self._imported is None or self._imported.issuperset(modules):
            return
        self._imported.update(modules)
        with contextlib.suppress(OSError):
            line, there = socket.socketpair()
            here, answers = Pipe()
            self._importing = line, here
            with answers, there:
                socket.send_fds(self._line, [IMPORT], [answers.fileno(), there.fileno()])
            here.send((os.getcwd(), _path(), _environment(), settings(), list(modules)))

    def ready(self, patience_s: float = _STARTS_S) -> None:
        """Wait for what :meth:`begin` began, which would disturb what is timed here; for so long at most."""
        if self._line is not None:
            with contextlib.suppress(Exception), contextlib.closing(self.start(_nothing)) as process:
                process.answer(min(patience_s, _STARTS_S))

    def import_once(self, modules: Sequence[str]) -> None:
        """Have processes that start from now on begin with modules of libraries.

        They are imported in a fork, from which all others are forked then: what they draw at random as they are imported is one
        draw for all. Where a fork would not be safe with them (one has started a thread), or an import fails, ends the process
        or takes too long, all start as before, and no other call changes that.
        """
        self.import_soon(modules)
        self._take_imported()

    def _take_imported(self, patience_s: float = _IMPORT_S) -> None:
        """Where modules are being imported, wait for that, and fork from there from now on if all went well in time."""
        if self._importing is None:
            return
        (line, here), self._importing = self._importing, None
        safe = False
        pid = 0
        try:
            with contextlib.suppress(EOFError, OSError), here:
                if here.poll(_STARTS_S if patience_s else 0.0):
                    pid = here.recv()
                    if here.poll(patience_s):
                        safe, pid = here.recv(), 0
        finally:  # an interrupt leaves nothing behind either
            if safe and self._line is not None:
                _end(self._line)
                self._line = line
            else:
                _end(line)
                self._imported = None
                if pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def line(self) -> socket.socket:
        """A line to a new process that forks one for each pipe that is sent there."""
        line, there = socket.socketpair()
        with there:
            self._interpreter("fork", there.fileno())
        return line

    def fork(self, work: Callable[..., Any], *args: Any) -> Process:
        """Start ``work(*args)`` in a copy of this process, for what cannot be sent to another.

        It has one thread, as torch's own do not survive a fork, no accelerator, and is none of torchrun's ranks.
        """
        here, there = Pipe()
        pid = os.fork()
        if pid:
            there.close()
            self._copies.append(pid)
            return Process(here, self, leads=False)
        try:
            here.close()
            gc.freeze()  # a process group among what the parent left would wait for threads that stayed there
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's profiler talks there
            for name in filter(_LAUNCHED.match, list(os.environ)):
                del os.environ[name]
            torch.set_num_threads(1)
            with contextlib.suppress(ConnectionError):  # whoever asked has gone
                there.send(tried(work, *args))
        finally:
            os._exit(0)

    def _interpreter(self, what: str, fd: int) -> None:
        command = [sys.executable, "-c", _ENTRY, what, str(fd), repr(_path())]
        self._interpreters.append(
            subprocess.Popen(
                command, pass_fds=(fd,),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip


def _end(line: socket.socket) -> None:
    """Close a line for all that hold it: a process that was forked here in between, as to load data, has a copy."""
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()


def _environment() -> dict[str, str]:
    """The environment without what torchrun says to its processes."""
    return {name: value for name, value in os.environ.items() if not _LAUNCHED.match(name)}


def _path() -> list[str]:
    """Where modules are looked for; import passes over entries that are no strings."""
    return [entry for entry in sys.path if isinstance(entry, str)]
