"""Run in a process for measurements: wait for a request, run it in the environment of the requesting process, and answer.

There are two kinds of such processes. One runs a single request. The other has imported castwise, touched no device and started no
thread, and forks for each request.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from castwise.core.heap import HEAP, can_keep
from castwise.core.plans.plan import Plan
from castwise.core.session.process import put_settings
from castwise.errors import WorkloadError, place, told

FORK, IMPORT = b".", b"i"
"""Requests to the process that forks: fork to run a request, or import libraries and fork from then on."""
_NEEDED = ("castwise.lab.timing.apart", "castwise.lab.timing.memory", "torch._dynamo", "torch.profiler")
"""Modules imported before forking: an optimizer's first step imports Dynamo, which takes seconds."""
_LONGEST_S = 60
"""Seconds after which a process that imports libraries is killed."""
_BLOCKS, _LEAST_BLOCK, _LARGEST_BLOCK = 300, 64, 1500
"""Number of random blocks on a heap, bytes of the smallest, and the ratio of the largest to it."""
_scattered: list[torch.Tensor] = []

COMPILED = "CASTWISE_COMPILED"
"""Environment variable that tells measuring processes the folder of each plan's compiled code."""


def belong_to(plan: Plan) -> None:
    """Configure this process for one plan: it keeps freed memory if the plan says so, and compiles into a cache of the plan.

    The cache is used only if a search has set a folder for compiled code (:data:`COMPILED`). That folder then also holds temporary
    files, so what a killed compiler leaves behind is there too.
    """
    if plan.host_memory == "keep" and can_keep():
        HEAP.host_memory = "keep"
    folder = os.environ.get(COMPILED)
    if folder and plan.compile != "as_given":
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, plan.digest[:16])
        os.environ["TMPDIR"] = tempfile.tempdir = folder


def page_faults() -> int:
    """Return the number of page faults of this process so far; 0 if the system does not report it."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def libraries(names: Iterable[str]) -> list[str]:
    """Return those of the given imported modules that belong to installed libraries.

    Modules of torch and castwise are left out, since importing them in advance would not make a start faster. The user's own modules
    are left out, since they may hold state that each process must create.
    """
    installed = tuple(os.path.join(sysconfig.get_path(where), "") for where in ("purelib", "platlib"))
    return [
        name
        for name in dict.fromkeys(names)
        if name.partition(".")[0] not in ("torch", "castwise")
        and (getattr(sys.modules.get(name), "__file__", None) or "").startswith(installed)
    ]


def serve(what: str, fd: int) -> None:
    """Serve requests in a new interpreter: with ``what="run"`` run one request, with ``"fork"`` fork for each request."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the requesting process handles the interrupt and closes the pipe
    if what == "run":
        _run(fd)
        return
    for module in _NEEDED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that a fork's garbage collection copies none of these pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps ended children
    _fork_each(fd)


def _fork_each(fd: int) -> None:
    """Fork once for each request that is received over a socket, until the socket closes.

    A fork runs one request, or imports libraries and then forks for each request in place of this process.
    """
    with socket.socket(fileno=fd) as line:
        while True:
            message, fds, _, _ = socket.recv_fds(line, 1, 2)
            if not message:
                return
            if os.fork() == 0:
                line.close()
                try:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    if message == IMPORT:
                        _import(*fds)
                    else:
                        scatter()
                        _run(*fds)
                finally:
                    os._exit(0)
            for each in fds:
                os.close(each)


def _import(fd: int, line: int) -> None:
    """Import the requested modules in this process; then fork for each request that comes over a socket.

    If the modules make forking less safe than before, no requests are served.
    """
    safe = False
    with Connection(fd) as pipe:
        pipe.send(os.getpid())
        folder, path, environment, values, modules = pipe.recv()
        _go_to(folder, path, environment, values)
        before = _strange_threads()
        with contextlib.suppress(
            BaseException
        ):  # a partial import is worse than none; each process imports itself
            signal.alarm(_LONGEST_S)  # the requesting process may have ended
            for module in modules:
                importlib.import_module(module)
            signal.alarm(0)
            gc.collect()
            gc.freeze()
            safe = all(now <= then for now, then in zip(_strange_threads(), before, strict=True))
        pipe.send(safe)
    if safe:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _fork_each(line)


def _strange_threads() -> tuple[int, int]:
    """Count the threads that may break in a fork: Python's threads, and native threads.

    OpenBLAS's threads are left out, since OpenBLAS handles forks itself.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        pools = {line.split()[-1] for line in lines if "openblas" in line}
    limits = (os.environ.get(f"{name}_NUM_THREADS", "") for name in ("OPENBLAS", "OMP"))
    each = min([len(os.sched_getaffinity(0)), *(int(limit) for limit in limits if limit.isdecimal())])
    return threading.active_count(), len(os.listdir("/proc/self/task")) - len(pools) * max(0, each - 1)


def scatter() -> None:
    """Allocate blocks of random sizes on the heap and free about half of them, so that each process has other holes in its heap.

    The holes determine how much memory returns to the system after each training step and is requested again with page faults: from
    none to thousands of page faults per step. Forks inherit the holes of their parent. So without this function all starts from one
    process would be a single sample.
    """
    draw = random.Random()
    blocks = [
        torch.empty(round(_LEAST_BLOCK * _LARGEST_BLOCK ** draw.random()), dtype=torch.uint8, device="cpu")
        for _ in range(_BLOCKS)
    ]
    _scattered.extend(block for block in blocks if draw.random() < 0.5)


def _run(fd: int) -> None:
    os.setpgid(0, 0)  # its children, such as data loaders and compilers, end with it
    with (
        Connection(fd) as pipe,
        contextlib.suppress(EOFError, ConnectionError),
    ):  # the requesting process has ended
        pipe.send(os.getpid())
        pipe.send(tried(_as_asked, pipe, *pipe.recv()))


def _as_asked(
    pipe: Connection, folder: str, path: list[str], environment: Mapping[str, str], values: Mapping[str, Any],
    work: Callable[..., Any], args: Sequence[Any],
) -> Any:  # fmt: skip
    """Run a request with the folder, module search path, environment variables and settings of the requesting process."""
    _go_to(folder, path, environment, values)
    return work(pipe, *args)


def _go_to(folder: str, path: list[str], environment: Mapping[str, str], values: Mapping[str, Any]) -> None:
    os.chdir(folder)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    put_settings(values)


def tried(work: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Call a function; return whether it failed, and its result, or the pickled exception with its traceback and location."""
    try:
        return False, work(*args)
    except (Exception, SystemExit) as error:
        return True, (_pickled(error), "".join(traceback.format_exception(error)), place(error))


def _pickled(error: BaseException) -> bytes:
    """Pickle an exception; if it could not be unpickled again, pickle a ``WorkloadError`` that describes it."""
    if not isinstance(error, SystemExit):  # it would end the requesting process
        with contextlib.suppress(Exception):  # an exception with own arguments pickles, but fails to unpickle
            data = pickle.dumps(error)
            if isinstance(pickle.loads(data), Exception):
                return data
    return pickle.dumps(WorkloadError(told(error)))  # torch's own exceptions pickle
