"""Output of the commands: answers go to standard output as text or one JSON object, everything else to standard error."""

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
"""Exit codes."""
FEW = 3
"""Largest number of files to name one by one."""


class Shown(Protocol):
    """A result that a command prints."""

    def table(self, *, verbose: bool) -> RenderableType:
        """Text for a person: complete, or what fits on a screen."""

    def to_dict(self) -> dict[str, Any]:
        """Data for a program."""


class Answer:
    """The output of a command: text for a person or, on request, one JSON object for a program.

    Args:
        json: Whether to print JSON: one object when the command ends, including any error.
        verbose: Whether to print the complete text, or what fits on a screen.
    """

    def __init__(self, json: bool, verbose: bool = True) -> None:
        self._json, self._verbose = json, verbose
        self._record: dict[str, Any] = {}

    def __call__(self, result: Shown, save: Callable[[], Sequence[Path]] = lambda: ()) -> None:
        """Print a result and the names of its files."""
        self.give(result.to_dict, lambda console: console.print(result.table(verbose=self._verbose)), save)

    def give(
        self,
        record: Callable[[], dict[str, Any]],
        show: Callable[[Console], None],
        save: Callable[[], Sequence[Path]] = lambda: (),
    ) -> None:
        """Write the files, then print; if one fails, the other still runs."""
        paths: Sequence[Path] = ()
        try:
            paths = save()
        finally:
            if self._json:
                self._record |= {**record(), **({"wrote": [str(path) for path in paths]} if paths else {})}
            else:
                with _reader():  # click's echo ignores what an ASCII terminal can show
                    show(_console())
                    for line in self._wrote(paths):
                        print(line)

    def _wrote(self, paths: Sequence[Path]) -> Sequence[str]:
        """Text that says where the files are: each file, or the page and the folder of the others."""
        if not paths:
            return ()
        if self._verbose or len(paths) <= FEW:
            return ("Wrote", *(f"  {path}" for path in paths))
        pages = [path for path in paths if path.suffix == ".html"]
        first = pages[0] if pages else paths[0]
        return (f"Wrote {first} and {len(paths) - 1} other files beside it",)

    def fail(self, error: BaseException, text: str, code: int) -> typer.Exit:
        """Print an error as a sentence, and return the exception that ends the command."""
        text += "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        if _say(text) and self._json:
            self._record |= error_record(error, text, code)
        return typer.Exit(code)

    def end(self) -> None:
        """Print the JSON output."""
        if self._record:
            with _reader():
                print(json.dumps(self._record, indent=1, allow_nan=False), flush=True)


def error_record(error: BaseException, text: str, code: int) -> dict[str, Any]:
    """Return an error as a JSON record."""
    return {"error": {"type": type(error).__name__.lstrip("_"), "message": text, "exit_code": code}}


@contextlib.contextmanager
def answering(
    show_traceback: bool, *, json: bool = False, verbose: bool = True, terminable: bool = True
) -> Iterator[Answer]:
    """Context for a command: turns every error into one sentence on standard error and exit code 1.

    Args:
        show_traceback: Print tracebacks.
        json: Print one JSON object. All other output, including a workload's own, goes to standard error.
        verbose: Print the complete text, not only what fits on a screen.
        terminable: Handle SIGTERM like an interrupt, unless the parent process set it to be ignored.
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
    """Redirect standard output to standard error, also for child processes."""
    sys.stdout.flush()
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(sys.stderr):
        with contextlib.suppress(OSError):  # closed
            stack.callback(_put_back, os.dup(1))
            os.dup2(2, 1)
        yield


@contextlib.contextmanager
def _left_out_in_a_sentence() -> Iterator[None]:
    """Print warnings about missing optional libraries as plain sentences, without a source location."""
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
    """The command group; prints usage errors as JSON if ``--json`` is given."""

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
    """The output folder; made before the work starts."""
    from castwise.commands.jobs import make_folder
    from castwise.lab.workloads.workload import find_workload

    name = find_workload(workload).name  # first, so that a wrong name creates no folder
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
    """Replace characters that an output's encoding lacks, so that printing never fails."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAINLY)


_PLAINLY = "castwise.plainly"
_PLAIN = {"±": "+-", "…": "...", "·": "-", "─": "-", "━": "-", "╺": "-", "╸": "-", "—": "-"}


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """Return a replacement for characters that an output's encoding lacks."""
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
    """Context for printing: if the reader has closed the pipe, as ``head`` does, the command ends silently."""
    try:
        yield
    except (BrokenPipeError, SystemExit):  # rich turns BrokenPipeError into SystemExit
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None


class _Terminated(KeyboardInterrupt):
    """SIGTERM, sent by ``timeout``, Slurm and Docker; handled like an interrupt."""


_coming: weakref.ref[_Terminated] | None = None


def _terminate(*_signal: object) -> None:
    global _coming
    if _coming is None or _coming() is None:  # timeout sends it to both the process and its group
        error = _Terminated()
        _coming = weakref.ref(error, _terminate_again)
        raise error


def _terminate_again(_gone: object) -> None:
    """Send the signal again if a library swallowed the exception, as some do during import."""
    if _coming is not None:
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()


def _say(text: str) -> bool:
    """Print an error unless another process failed first; return whether this process printed."""
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
