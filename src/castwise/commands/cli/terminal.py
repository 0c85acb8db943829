"""Prints the output of commands: results as text or JSON to standard output, and everything else to standard error."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer
from typer.core import TyperGroup

from castwise.core.extras import LeftOutWarning
from castwise.errors import CastwiseError, place, sentence

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FAILED, MISUNDERSTOOD, INTERRUPTED, TERMINATED = 1, 2, 130, 143
"""The exit codes of a command that failed, was used wrongly, was interrupted, or was terminated by SIGTERM."""
FEW = 3
"""If a command has written at most this many files, its output names all of them."""


class Shown(Protocol):
    """The interface of a result that a command prints."""

    def table(self, *, verbose: bool) -> RenderableType:
        """Return the result for a person, complete if ``verbose``, else what fits on a screen."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, for a program."""


class Answer:
    """Prints the result of a command, as text for a person or as one JSON object for a program.

    Args:
        json: Whether to print JSON. The object is printed when the command ends, and includes any error.
        verbose: Whether to print the complete text, instead of what fits on a screen.
    """

    def __init__(self, json: bool, verbose: bool = True) -> None:
        self._json, self._verbose = json, verbose
        self._record: dict[str, Any] = {}

    def __call__(self, result: Shown, save: Callable[[], Sequence[Path]] = lambda: ()) -> None:
        """Write the files of a result by ``save``, then print the result and the names of the files."""
        self.give(result.to_dict, lambda console: console.print(result.table(verbose=self._verbose)), save)

    def give(
        self,
        record: Callable[[], dict[str, Any]],
        show: Callable[[Console], None],
        save: Callable[[], Sequence[Path]] = lambda: (),
    ) -> None:
        """Write files by ``save``, then print a result, also if writing fails.

        Args:
            record: Returns the result as JSON values.
            show: Prints the result as text.
            save: Writes the files and returns their paths.
        """
        paths: Sequence[Path] = ()
        try:
            paths = save()
        finally:
            if self._json:
                self._record |= {**record(), **({"wrote": [str(path) for path in paths]} if paths else {})}
            else:
                with _reader():  # not click's echo, which fails on an ASCII terminal
                    show(_console())
                    for line in self._wrote(paths):
                        print(line)

    def _wrote(self, paths: Sequence[Path]) -> Sequence[str]:
        """Return the lines that name the written files. If there are many, only the page and the number of others are named."""
        if not paths:
            return ()
        if self._verbose or len(paths) <= FEW:
            return ("Wrote", *(f"  {path}" for path in paths))
        pages = [path for path in paths if path.suffix == ".html"]
        first = pages[0] if pages else paths[0]
        return (f"Wrote {first} and {len(paths) - 1} other files beside it",)

    def fail(self, error: BaseException, text: str, code: int) -> typer.Exit:
        """Print an error as a sentence, and return the exception that ends the command with the exit code ``code``."""
        text += "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        if _say(text) and self._json:
            self._record |= error_record(error, text, code)
        return typer.Exit(code)

    def end(self) -> None:
        """Print the JSON object, if there is one, at the end of the command."""
        if self._record:
            with _reader():
                print(json.dumps(self._record, indent=1, allow_nan=False), flush=True)


def error_record(error: BaseException, text: str, code: int) -> dict[str, Any]:
    """Return an error as a JSON object."""
    return {"error": {"type": type(error).__name__.lstrip("_"), "message": text, "exit_code": code}}


@contextlib.contextmanager
def answering(
    show_traceback: bool, *, json: bool = False, verbose: bool = True, terminable: bool = True
) -> Iterator[Answer]:
    """Run a command inside a ``with`` block, and yield the :class:`Answer` that prints its result.

    An error becomes a sentence on standard error, and exit code 1. An interrupt and SIGTERM have exit codes of their own.

    Args:
        show_traceback: Print the traceback of an error.
        json: Print the result as one JSON object. All other output, including a workload's own, goes to standard error.
        verbose: Print the complete text, instead of what fits on a screen.
        terminable: Handle SIGTERM like an interrupt, unless the parent process has set SIGTERM to be ignored.
    """
    global _coming
    answer, before = Answer(json, verbose), None
    if terminable and signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        with contextlib.suppress(ValueError):  # not the main thread
            before = signal.signal(signal.SIGTERM, _terminate)
    try:
        with _aside() if json else contextlib.nullcontext(), _left_out_in_a_sentence():
            yield answer
    except typer.Exit:
        raise
    except _Terminated as error:
        raise answer.fail(error, "terminated", TERMINATED) from None
    except KeyboardInterrupt as error:
        raise answer.fail(error, "interrupted", INTERRUPTED) from None
    except (Exception, SystemExit) as error:
        if show_traceback:
            traceback.print_exc(file=sys.stderr)
        raise answer.fail(error, _said(error), FAILED) from None
    finally:
        if before is not None:
            _coming = None
            signal.signal(signal.SIGTERM, before)
        answer.end()


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Redirect standard output to standard error inside a ``with`` block, also for child processes."""
    sys.stdout.flush()
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(sys.stderr):
        with contextlib.suppress(OSError):  # standard output is closed
            stack.callback(_put_back, os.dup(1))
            os.dup2(2, 1)
        yield


@contextlib.contextmanager
def _left_out_in_a_sentence() -> Iterator[None]:
    """Print warnings about missing optional libraries as plain sentences, without source locations, inside a ``with`` block."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, LeftOutWarning):
            print(f"castwise: {message}", file=sys.stderr)
        else:
            before(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _put_back(kept: int) -> None:
    os.dup2(kept, 1)
    os.close(kept)


class Commands(TyperGroup):
    """The Typer group of all commands. It prints usage errors as JSON if ``--json`` is given."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the command line into a context."""
        self._wants_json = "--json" in args
        with self._misunderstood():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the command line names."""
        with self._misunderstood():
            return super().invoke(ctx)

    @contextlib.contextmanager
    def _misunderstood(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Typer vendors click or imports it, depending on the release: errors of both have an exit code and print themselves.
            if (
                self._wants_json
                and getattr(error, "exit_code", None) == MISUNDERSTOOD
                and hasattr(error, "format_message")
            ):
                print(json.dumps(error_record(error, error.format_message(), MISUNDERSTOOD), indent=1))
            raise


@contextlib.contextmanager
def folder_for(out: Path | None, command: str, workload: str, make: bool = True) -> Iterator[Path]:
    """Create the output folder of a command, before the work in the ``with`` block starts, and yield the path.

    Without ``out``, the folder is ``runs/COMMAND-WORKLOAD``. If an error leaves the folder empty, it is removed again.
    """
    from castwise.commands.jobs import make_folder
    from castwise.lab.workloads.workload import find_workload

    name = find_workload(workload).name  # before anything is created, so that a wrong name creates no folder
    plain = re.sub(r"[^\w.-]+", "-", name)
    folder = out if out is not None else Path("runs") / f"{command}-{plain}"
    found = not make or folder.exists()
    try:
        if make:
            make_folder(folder, "--out")
        yield folder
    except BaseException:
        with contextlib.suppress(OSError):
            if not found:
                folder.rmdir()  # only if it is empty
        raise


def show_plainly() -> None:
    """Make standard output and error replace characters that their encoding lacks, so that printing never fails."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAINLY)


_PLAINLY = "castwise.plainly"
_PLAIN = {"±": "+-", "…": "...", "·": "-", "─": "-", "━": "-", "╺": "-", "╸": "-", "—": "-"}


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """Return a replacement for characters that an output's encoding lacks, as an error handler of :mod:`codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in lacking), error.end


codecs.register_error(_PLAINLY, _plainly)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    # Typer's test runner replaces sys.stdout and sys.stderr, so consoles are not cached.
    return Console(stderr=stderr)


@contextlib.contextmanager
def _reader() -> Iterator[None]:
    """End the command silently if the reader of its output closes the pipe inside the ``with`` block, as ``head`` does."""
    try:
        yield
    except (BrokenPipeError, SystemExit):  # rich turns BrokenPipeError into SystemExit
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None


class _Terminated(KeyboardInterrupt):
    """Raised when SIGTERM arrives, which ``timeout``, Slurm and Docker send. It is handled like an interrupt."""


_coming: weakref.ref[_Terminated] | None = None


def _terminate(*_signal: object) -> None:
    global _coming
    if _coming is None or _coming() is None:  # timeout sends SIGTERM twice: to the process and to its group
        error = _Terminated()
        _coming = weakref.ref(error, _terminate_again)
        raise error


def _terminate_again(_gone: object) -> None:
    """Send SIGTERM again if a library caught and dropped the exception, as some libraries do during import."""
    if _coming is not None:
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()


def _say(text: str) -> bool:
    """Print an error unless another process failed first, and return whether the error was printed."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from castwise.commands.jobs.processes import first_fault, started

        rank = f"rank {started()[0]}: "
        if not first_fault(text).startswith(rank):
            return False
        text = rank + text
    print(f"castwise: {text}", file=sys.stderr)
    return True


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and not isinstance(error, CastwiseError):
        return f"{error.strerror}: {os.fspath(error.filename)!r}" if error.filename else error.strerror
    if isinstance(error, CastwiseError):
        return sentence(error)
    return f"{sentence(error)} ({'; '.join(filter(None, (place(error), '--traceback shows where')))})"
