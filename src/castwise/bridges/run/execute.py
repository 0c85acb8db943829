"""Runs a script or a module as the Python interpreter does: with the same arguments, errors, exit code and signals."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.machinery
import os
import runpy
import signal
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path

from castwise.bridges.run.gate import EnoughError
from castwise.errors import CastwiseError


def check(target: str, is_module: bool, command: str = "run") -> None:
    """Check that the script exists. A module is not checked here, but looked up when it is run.

    Raises:
        CastwiseError: The script does not exist.
    """
    if not is_module and not Path(target).is_file():
        what = "is a folder" if Path(target).is_dir() else "does not exist"
        raise CastwiseError(
            f"castwise {command} {target!r}: {what}; allowed: the path of a Python script, as for python itself, or -m and the name of "
            "a module. Options of castwise go before the script, and options of the script after it"
        )


def execute(target: str, arguments: Sequence[str] = (), *, is_module: bool = False) -> None:
    """Run a script in this process as ``__main__``.

    If the script exits or raises an uncaught error, SystemExit is raised here.

    Args:
        target: Path of the script, or name of the module.
        arguments: The script's arguments, which become ``sys.argv[1:]``.
        is_module: Run ``target`` as a module, like ``python -m``.

    Raises:
        SystemExit: The script raised it. After an uncaught error, the traceback is printed and the exit code is 1.
        EnoughError: The script runs under ``castwise try`` and has made all steps that are needed.
    """
    try:
        folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
        # the script's folder replaces the sys.path entry that the interpreter made for castwise
        own = sys.path[:1] if sys.path[:1] in ([""], [os.getcwd()], [os.path.dirname(sys.argv[0])]) else []
        sys.path[: len(own)] = [folder]
        sys.argv = [target, *arguments]
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            _run_file(target)
    except (SystemExit, EnoughError):
        raise
    except KeyboardInterrupt as error:
        _show(error)
        _end_by_signal()
    except BaseException as error:
        _show(error)
        raise SystemExit(1) from None


def _run_file(target: str) -> None:
    target = os.path.abspath(target)
    main = types.ModuleType("__main__")
    vars(main).update(
        __file__=target, __builtins__=builtins, __loader__=importlib.machinery.SourceFileLoader("__main__", target)
    )  # fmt: skip
    sys.modules["__main__"] = main
    with open(target, "rb") as file:
        code = compile(file.read(), target, "exec", dont_inherit=True)
    exec(code, vars(main))


def _show(error: BaseException) -> None:
    """Print the traceback of an error, starting at the first frame of the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _end_by_signal() -> None:
    """End this process by SIGINT, as the interpreter does after an interrupt, so that the parent process sees the signal."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Wait ``grace_s`` seconds for a process to end, then end the process and its children by signals.

    The process must lead a session of its own.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    for number in (
        signal.SIGTERM,
        signal.SIGKILL,
    ):  # SIGTERM first: multiprocessing's resource tracker outlives the process, and cleans up
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            time.sleep(0.1)
    process.wait()


def last_words(said: Sequence[str]) -> str:
    """Return the last line that is not empty, or ``none``."""
    return next((line for line in reversed(said) if line.strip()), "none")
