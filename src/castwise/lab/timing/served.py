"""What a process that measures does: it waits for what is asked, does it in the surroundings of the one that asked, and answers.

One kind does one thing; another, which has imported castwise, touched no device and started no thread, forks a process for each.
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
"""What the process that is forked is asked for."""
_NEEDED = ("castwise.lab.timing.apart", "castwise.lab.timing.memory", "torch._dynamo", "torch.profiler")
"""What is forked has imported this: an optimizer's first step imports Dynamo, which takes seconds."""
_LONGEST_S = 60
"""What imports for longer is ended."""
_BLOCKS, _LEAST_BLOCK, _LARGEST_BLOCK = 300, 64, 1500
"""How many blocks lie on a heap at random, the bytes of the least, and how many times as large the largest is."""
_scattered: list[torch.Tensor] = []

COMPILED = "CASTWISE_COMPILED"
"""Names, to processes that measure, the folder where the compiled code of each plan is kept apart."""


def belong_to(plan: Plan) -> None:
    """Make this process a plan's own: it keeps memory for good if the plan does, and what it compiles where no other looks.

    The latter if a search says so, in whose folder also lies what the compiler leaves behind when it is killed.
    """
    if plan.host_memory == "keep" and can_keep():
        HEAP.host_memory = "keep"
    folder = os.environ.get(COMPILED)
    if folder and plan.compile != "as_given":
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, plan.digest[:16])
        os.environ["TMPDIR"] = tempfile.tempdir = folder


def page_faults() -> int:
    """How many pages of memory the system has given this process so far; 0 where it does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def libraries(names: Iterable[str]) -> list[str]:
    """Of some names of modules that are imported those of installed libraries.

    None of torch, which starts no faster for it, and none of the user's own, which may hold what each process has to make anew.
    """
    installed = tuple(os.path.join(sysconfig.get_path(where), "") for where in ("purelib", "platlib"))
    return [
        name
        for name in dict.fromkeys(names)
        if name.partition(".")[0] not in ("torch", "castwise")
        and (getattr(sys.modules.get(name), "__file__", None) or "").startswith(installed)
    ]


def serve(what: str, fd: int) -> None:
    """What a started interpreter does: ``run`` one thing, or ``fork`` for each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked is interrupted, and closes the pipe
    if what == "run":
        _run(fd)
        return
    for module in _NEEDED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a fork then copies none of it where its collector looks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system takes away what has ended
    _fork_each(fd)


def _fork_each(fd: int) -> None:
    """Fork a process for each pipe that comes over a line, or one to fork the next from, until it closes."""
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
    """Import what is asked for as a process that needs it would, then fork what comes over a line, if that is as safe as it was."""
    safe = False
    with Connection(fd) as pipe:
        pipe.send(os.getpid())
        folder, path, environment, values, modules = pipe.recv()
        _go_to(folder, path, environment, values)
        before = _strange_threads()
        with contextlib.suppress(
            BaseException
        ):  # half an import is worse than none; each process meets it for itself
            signal.alarm(_LONGEST_S)  # whoever asked may have gone
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
    """Threads that a fork may not survive: Python's, and all but those of copies of OpenBLAS, which look after it themselves."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        pools = {line.split()[-1] for line in lines if "openblas" in line}
    limits = (os.environ.get(f"{name}_NUM_THREADS", "") for name in ("OPENBLAS", "OMP"))
    each = min([len(os.sched_getaffinity(0)), *(int(limit) for limit in limits if limit.isdecimal())])
    return threading.active_count(), len(os.listdir("/proc/self/task")) - len(pools) * max(0, each - 1)


def scatter() -> None:
    """Leave blocks of random sizes on the heap, as many as are freed again.

    Where a process's heap has holes decides how much of it goes back to the system after each step, and comes again as page
    faults: none to thousands per step of one training. Forks inherit the holes, so that without this all starts of one home
    would be one draw.
    """
    draw = random.Random()
    blocks = [
        torch.empty(round(_LEAST_BLOCK * _LARGEST_BLOCK ** draw.random()), dtype=torch.uint8, device="cpu")
        for _ in range(_BLOCKS)
    ]
    _scattered.extend(block for block in blocks if draw.random() < 0.5)


def _run(fd: int) -> None:
    os.setpgid(0, 0)  # what it starts, as to load data or to compile, goes with it
    with Connection(fd) as pipe, contextlib.suppress(EOFError, ConnectionError):  # whoever asked has gone
        pipe.send(os.getpid())
        pipe.send(tried(_as_asked, pipe, *pipe.recv()))


def _as_asked(
    pipe: Connection, folder: str, path: list[str], environment: Mapping[str, str], values: Mapping[str, Any],
    work: Callable[..., Any], args: Sequence[Any],
) -> Any:  # fmt: skip
    """What was asked for, in the surroundings of the process that asked."""
    _go_to(folder, path, environment, values)
    return work(pipe, *args)


def _go_to(folder: str, path: list[str], environment: Mapping[str, str], values: Mapping[str, Any]) -> None:
    os.chdir(folder)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    put_settings(values)


def tried(work: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Whether it failed, and what it returned or raised."""
    try:
        return False, work(*args)
    except (Exception, SystemExit) as error:
        return True, (_pickled(error), "".join(traceback.format_exception(error)), place(error))


def _pickled(error: BaseException) -> bytes:
    """An exception as bytes that become one again; in words where it would not."""
    if not isinstance(error, SystemExit):  # which would end who asked
        with contextlib.suppress(
            Exception
        ):  # one with arguments of its own pickles, and fails when it is made again
            data = pickle.dumps(error)
            if isinstance(pickle.loads(data), Exception):
                return data
    return pickle.dumps(WorkloadError(told(error)))  # torch's own travel
