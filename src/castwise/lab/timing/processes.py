"""Start processes for measurements; each holds only what it measures, under the settings of the process that requests it.

On systems with safe forks, starting a process is cheap: one process imports castwise, touches no device and starts no thread, and
is forked for each request. On other systems each request starts a new interpreter. Requests and answers go over a pipe.

A process that is no longer needed is killed with its process group, so no process outlives the requesting process. A process that
hangs delays the requesting process for at most a limited time (:attr:`Home.patience_s`). The libraries that the first process
imported for a workload are imported once for all later processes (:meth:`Home.import_once`).
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
"""Whether forks are safe on this system."""
_RECEIVED_S = 60.0
"""Seconds that a process may take to receive a workload."""
PATIENCE_S = 600.0
"""Seconds without an answer after which a process counts as hanging, unless a caller sets another limit."""
HURRY = 0.1
"""Factor by which :attr:`Home.patience_s` is multiplied after a process has hung."""
_STARTS_S = 60.0
"""Seconds that a forked process may take to start."""
_ENDS_S = 5.0
"""Seconds that a process may take to end, or to report its id, after it was told to."""
_ENTRY = """
import ast, sys
sys.path[:] = ast.literal_eval(sys.argv[3])
from castwise.lab.timing.served import serve
serve(sys.argv[1], int(sys.argv[2]))
"""
_LAUNCHED = re.compile(
    r"(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|ROLE_NAME|ROLE_RANK|ROLE_WORLD_SIZE)$|(LOCAL|GROUP)_(RANK|WORLD_SIZE)$|TORCHELASTIC_"
)
"""torchrun's environment variables, which are removed: a measuring process is not one of the ranks."""

_IMPORT_S = 10.0
"""Seconds that an import for all processes may take; if it takes longer, each process imports by itself."""


class SilentError(CastwiseError):
    """Raised when a process has not answered in time: it hangs, or is far slower than expected."""


class NotThereError(WorkloadError):
    """Raised when a workload cannot be sent to another process, or does not run there."""


def portable(workload: Workload | str) -> bytes:
    """Pickle a workload, or its name, for another process.

    With cloudpickle installed, the workload may contain lambdas and functions of scripts.

    Raises:
        NotThereError: The workload holds something that cannot be pickled, such as a lock or a generator.
    """
    try:
        return _dumps(workload)
    except Exception as error:  # pickling runs code of the pickled objects
        name = workload if isinstance(workload, str) else workload.name
        raise NotThereError(
            f"workload {name!r} cannot be sent to another process ({sentence(error, whole=False)}); define it in a "
            f"file and name it file.py:attribute{_or_install()}"
        ) from error


def _dumps(workload: Workload | str) -> bytes:
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle.dumps(workload)  # without cloudpickle, definitions of a script cannot be sent
    return bytes(cloudpickle.dumps(workload))


def _or_install() -> str:
    """Return the end of an error message, which advises to install cloudpickle; empty if cloudpickle is installed."""
    if importlib.util.find_spec("cloudpickle") is not None:
        return ""
    return f", or let cloudpickle send it: {install('cloudpickle')}"


def received(workload: bytes) -> Workload:
    """Unpickle a workload that another process has pickled with :func:`portable`."""
    found = pickle.loads(workload)
    return find_workload(found) if isinstance(found, str) else found


def delivered(home: Home, workload: Workload | str) -> bytes:
    """Pickle a workload, check that another process can unpickle it, and return the bytes.

    Raises:
        NotThereError: The workload cannot be pickled, or cannot be unpickled in another process: it needs a module that only
            this process has, or a value that was set here after the start.
    """
    sent = portable(workload)
    mark = hashlib.sha256(sent).digest()
    if mark not in home.delivered:
        try:
            with contextlib.closing(home.start(_receive, sent)) as process:
                process.answer(_RECEIVED_S)
        except Exception as error:  # unpacking runs the user's code
            raise not_there(workload, error) from error
        home.delivered.add(mark)
    return sent


def _nothing(_pipe: Connection) -> None: ...


def _receive(_pipe: Connection, sent: bytes) -> None:
    received(sent)


def not_there(workload: Workload | str, error: Exception) -> NotThereError:
    """Return the error for a workload that does not run in another process."""
    name = workload if isinstance(workload, str) else workload.name
    if isinstance(error, SilentError):
        return NotThereError(f"workload {name!r} hangs in another process: {error}")
    advice = f"; define all that it needs in a file and name it file.py:attribute{_or_install()}"
    return NotThereError(
        f"workload {name!r} does not run in another process ({told(error, whole=False)}){advice * (name is not workload)}"
    )


class Process:
    """A process for measurements, as the process that requested it sees it.

    Args:
        pipe: Connection to the process. If the process leads a process group, its first message is the group's id.
        home: What started the process.
        leads: Whether the process leads a process group.

    Attributes:
        at_work: Whether an answer is pending.
    """

    def __init__(self, pipe: Connection, home: Home, leads: bool = True) -> None:
        self._pipe, self._home, self._leads = pipe, home, leads
        self._group = 0
        self._asked = time.monotonic()
        self.at_work = True

    def send(self, message: object) -> None:
        """Send a message that needs an answer; if the process has ended, nothing happens here, and :meth:`answer` raises."""
        self._asked, self.at_work = time.monotonic(), True
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(message)

    def answer(self, timeout_s: float | None = None) -> Any:
        """Wait for the process's answer and return it.

        The wait ends ``timeout_s`` seconds after the request; by default that is :attr:`Home.patience_s`.

        Raises:
            Exception: The exception that was raised in the process, or an error that describes it if it cannot be pickled;
                :func:`castwise.errors.place` gives the location in the user's code.
            CastwiseError: The process ended without an answer, or did not answer in time; :meth:`close` then kills it.
        """
        try:
            if self._leads and not self._group:
                self._group = self._next(timeout_s)
            failed, value = self._next(timeout_s)
        except (EOFError, ConnectionError):
            self.at_work = False
            raise CastwiseError("the process ended without a message, perhaps out of memory") from None
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
        """Close the pipe, and kill the process with its process group; wait at most ``gone_s`` seconds until they are gone.

        Further calls do nothing.
        """
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
    """Starts processes that have imported castwise and done nothing else.

    It is a context manager, which ends the processes at its end.

    Attributes:
        delivered: Digests of the workloads that a process started here has unpacked successfully.
        patience_s: Maximum number of seconds from a request to its answer. After one process has hung, the limit is a tenth of
            that, since others usually hang for the same reason.
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
        """Return this object without starting a process; the process to fork from starts with the first request."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the process that is forked for each request, started interpreters, and forks of this process."""
        self._take_imported(0.0)
        if self._line is not None:
            _end(self._line)
            self._line = None
        while self._interpreters:
            process = self._interpreters.pop()
            if not self._asked:  # it may still be starting
                process.kill()
            try:
                process.wait(timeout=_ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        while self._copies:
            pid = self._copies.pop()
            os.kill(pid, signal.SIGKILL)  # its answer has arrived or is no longer needed
            os.waitpid(pid, 0)

    def start(self, work: Callable[..., Any], *args: Any) -> Process:
        """Start a new process that runs ``work(pipe, *args)``.

        ``work`` must be a module-level function. The last answer of the process is the function's result or exception.

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
            raise CastwiseError(
                f"no process for measurements could be started ({sentence(error)})"
            ) from error
        process = Process(here, self)
        process.send((os.getcwd(), _path(), _environment(), settings(), work, args))
        return process

    def has_seen_silence(self) -> None:
        """Note that a process has hung: later requests wait only a tenth of the time for an answer."""
        if not self._silent:
            self._silent = True
            self.patience_s *= HURRY

    def begin(self) -> None:
        """Start in the background the process that is forked for each request; if that fails, :meth:`start` raises later."""
        if FORKS and self._line is None:
            with contextlib.suppress(Exception):
                self._line = self.line()

    def import_soon(self, modules: Sequence[str]) -> None:
        """Do in the background what :meth:`import_once` does; the next :meth:`start` waits until it is done."""
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
        """Wait until the process that :meth:`begin` started is ready, at most ``patience_s`` seconds.

        Otherwise its start would disturb measurements.
        """
        if self._line is not None:
            with contextlib.suppress(Exception), contextlib.closing(self.start(_nothing)) as process:
                process.answer(min(patience_s, _STARTS_S))

    def import_once(self, modules: Sequence[str]) -> None:
        """Import modules of libraries once for all processes that are started from now on.

        The modules are imported in a fork, from which all later processes are forked. So random numbers that are drawn during the
        import are the same for all. Processes start as before if forks would be unsafe with these modules, because a module started
        a thread. The same holds if an import fails, ends the process or takes too long. Later calls do not try again.
        """
        self.import_soon(modules)
        self._take_imported()

    def _take_imported(self, patience_s: float = _IMPORT_S) -> None:
        """Wait for a background import; if it succeeded in time, fork all later processes from the process that imported."""
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
        finally:  # also after an interrupt
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
        """Start a process that forks whenever a pipe is sent to it; return the socket over which pipes are sent."""
        line, there = socket.socketpair()
        with there:
            self._interpreter("fork", there.fileno())
        return line

    def fork(self, work: Callable[..., Any], *args: Any) -> Process:
        """Run ``work(*args)`` in a fork of this process, for workloads that cannot be sent to another process.

        The fork has one thread, since torch's threads do not survive a fork. It cannot use an accelerator, and it is not one of
        torchrun's ranks.
        """
        here, there = Pipe()
        pid = os.fork()
        if pid:
            there.close()
            self._copies.append(pid)
            return Process(here, self, leads=False)
        try:
            here.close()
            gc.freeze()  # destroying the parent's process groups would wait for threads that the fork lacks
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's profiler writes there
            for name in filter(_LAUNCHED.match, list(os.environ)):
                del os.environ[name]
            torch.set_num_threads(1)
            with contextlib.suppress(ConnectionError):  # the requesting process has ended
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
    """Shut a socket down for all processes that hold it, such as a data loader's process that was forked while it was open."""
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()


def _environment() -> dict[str, str]:
    """Return the environment variables without torchrun's."""
    return {name: value for name, value in os.environ.items() if not _LAUNCHED.match(name)}


def _path() -> list[str]:
    """Return the module search path without entries that are not strings, which import ignores."""
    return [entry for entry in sys.path if isinstance(entry, str)]
