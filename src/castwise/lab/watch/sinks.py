"""Write samples, alarms and audits to outputs: a file of JSON lines, TensorBoard, any logger, the terminal.

An output that fails gives one warning and never stops the training.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from castwise.core.extras import needs
from castwise.core.session.process import interrupts_wait
from castwise.errors import PlanError
from castwise.lab.result import plain
from castwise.lab.watch.records import Alarm, Audit, MonitorReport, Sample

if TYPE_CHECKING:
    from rich.live import Live

Event = Sample | Alarm | Audit
_KINDS = {Sample: "sample", Alarm: "alarm", Audit: "audit"}


class JsonLines:
    """A file of JSON lines, which are all complete: a line that does not fit on the disk is removed again.

    Raises:
        PlanError: The file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        try:
            folder = os.path.dirname(self._path)
            if folder:
                os.makedirs(folder, exist_ok=True)
            self._file: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except (OSError, TypeError, ValueError) as error:
            raise PlanError(
                f"Monitor(jsonl={path!r}): cannot be written ({error}); give the path of a file"
            ) from error
        self._close_half_a_line()

    def _close_half_a_line(self) -> None:
        """End the partial line that a killed process may have left."""
        assert self._file is not None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, event: Event, report: Callable[[], MonitorReport]) -> None:
        """Append an event as a line."""
        if self._file is None:
            return
        kind = _KINDS[type(event)]
        row = plain({"event": kind, "time": round(time.time(), 3), **dataclasses.asdict(event)})
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError("the disk has no space left for the line")
        except BaseException:
            os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


class Board:
    """TensorBoard as an output: a writer that the user gave, or a new writer in a folder."""

    def __init__(self, where: Any) -> None:
        self._own = not hasattr(where, "add_scalar")
        if not self._own:
            self._writer: Any = where
            return
        if not isinstance(where, (str, os.PathLike)):
            raise PlanError(
                f"Monitor(tensorboard={where!r}): give a folder, or an object with add_scalar such as a SummaryWriter"
            )
        with needs("Monitor(tensorboard=...)"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(os.fspath(where))

    @interrupts_wait()
    def write(self, event: Event, report: Callable[[], MonitorReport]) -> None:
        """Add an event's numbers to the charts: numbers of modules in one group, all others in another."""
        for name, value in scalars(event).items():
            path, _, number = name.rpartition("/")
            grouped = isinstance(event, Sample) and path
            self._writer.add_scalar(
                f"monitor {number}/{path}" if grouped else f"monitor/{name}", value, event.step
            )
        if isinstance(event, Alarm):
            self._writer.add_text("monitor/alarms", f"{event.kind}: {event.message}", event.step)

    @interrupts_wait()
    def close(self) -> None:
        """Flush a writer that the user gave; close a writer that was made here."""
        self._writer.close() if self._own else self._writer.flush()


class Log:
    """A function ``log(values, step)`` as an output."""

    def __init__(self, log: Callable[[dict[str, float], int], object]) -> None:
        if not callable(log):
            raise PlanError(f"Monitor(log={log!r}): needs a function log(values, step), such as wandb.log")
        self._log = log

    def write(self, event: Event, report: Callable[[], MonitorReport]) -> None:
        """Pass an event's numbers to the function."""
        values = scalars(event)
        if values:
            self._log(values, event.step)

    def close(self) -> None:
        """Do nothing."""


class Screen:
    """The terminal as an output, if standard error is a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._live: Live | None = None
        self._console = Console(stderr=True)

    def write(self, event: Event, report: Callable[[], MonitorReport]) -> None:
        """Draw the report again."""
        if not self._console.is_terminal:
            return
        if self._live is None:
            from rich.live import Live

            # output that the training redirects to a file must still go there
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
            self._live.start()
            self._console.show_cursor(True)  # a killed process would leave it hidden
            atexit.register(self.close)
        self._live.update(report().table(), refresh=True)

    def close(self) -> None:
        """Stop drawing. The last report stays on the screen."""
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self.close)
            live.stop()


Sink = JsonLines | Board | Log | Screen


class Sinks:
    """All outputs of a monitor. On ranks other than the first there are none."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        self._failed: set[str] = set()

    def write(self, event: Event, report: Callable[[], MonitorReport]) -> None:
        """Write an event to each output.

        Warns:
            UserWarning: An output failed for the first time.
        """
        for sink in self._sinks:
            self._try(sink, lambda sink=sink: sink.write(event, report))  # type: ignore[misc]

    def close(self) -> None:
        """Close all outputs."""
        while self._sinks:
            sink = self._sinks.pop()
            self._try(sink, sink.close)

    def _try(self, sink: Sink, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            name = type(sink).__name__
            if name not in self._failed:
                self._failed.add(name)
                warnings.warn(
                    f"Monitor: {_WHAT[name]} failed ({type(error).__name__}: {error}); training and the monitor continue "
                    f"without that output",
                    stacklevel=2,
                )


_WHAT = {
    "JsonLines": "writing to jsonl=",
    "Board": "writing to tensorboard=",
    "Log": "the function of log=",
    "Screen": "the display of live=",
}


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event by name. Numbers that an audit did not compute are left out."""
    if isinstance(event, Sample):
        return event.scalars()
    if isinstance(event, Audit):
        found = {"audit/damage": event.damage, "audit/adam": event.adam}
        return {name: value for name, value in found.items() if value is not None}
    return {f"alarm/{event.kind}": 0.0 if event.cleared is not None else 1.0}
