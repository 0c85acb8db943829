"""Show a job's progress on standard error, for the command line and for ``progress=True`` from Python.

A terminal shows moving bars or stages. Any other output, such as a log of CI or nohup, gets lines, each as soon as it is known.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


EVERY_S = 10.0
"""Seconds between two lines of progress in one stage, if the output is no terminal."""


class Lines:
    """Prints a line when a stage begins, at most every ``EVERY_S`` seconds while it runs, and when it ends.

    With ``stages``, as for a search, the end gets no line.
    """

    def __init__(self, console: Console, stages: bool) -> None:
        self._console = console
        self._stages = stages
        self._start = time.monotonic()
        self._told: dict[tuple[str, str], float] = {}

    def __call__(self, event: Any) -> None:
        """Show an event, as :class:`Bars` does."""
        key, now = (event.stage, "" if self._stages else event.subject), time.monotonic()
        ends = event.done == event.total and not self._stages
        if not ends and now - self._told.get(key, -EVERY_S) < EVERY_S:
            return
        self._told[key] = now
        count = "" if self._stages else f"{event.done}/{event.total}"
        said = (" ".join(key).strip(), count, _figures(event) or event.message)
        line = f"{now - self._start:4.0f} s  {'  '.join(part for part in said if part)}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()


class Bars:
    """Shows a progress bar for each stage and subject of a job's events."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        def column() -> Column:
            return Column(no_wrap=True)

        self.bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=column()),
            BarColumn(bar_width=16, table_column=Column(min_width=4)),  # shrinks in a narrow terminal
            MofNCompleteColumn(table_column=column()),
            TimeRemainingColumn(compact=True, table_column=column()),
            TextColumn("{task.fields[figures]}", markup=False, table_column=column()),
            console=console,
        )
        self._tasks: dict[tuple[str, str], Any] = {}

    def __call__(self, event: Any) -> None:
        """Show an event, a :class:`castwise.commands.jobs.Event`. The events of a training also have a loss and a speed."""
        key = (event.stage, event.subject)
        figures = _figures(event)
        if key not in self._tasks:
            said = event.subject if figures else f"{event.stage} {event.subject}".strip()
            self.bars.start()  # bars appear only once there is something to show
            self._tasks[key] = self.bars.add_task(said, total=event.total, figures="")
        self.bars.update(
            self._tasks[key], completed=event.done, total=event.total, figures=figures or event.message
        )


def _figures(event: Any) -> str:
    if not hasattr(event, "loss"):
        return ""
    parts = [f"loss {event.loss:.4g}"]
    if event.loss_scale is not None:
        parts += [f"scale {event.loss_scale:g}", f"skipped {event.skipped_steps}"]
    return ", ".join([*parts, f"{event.steps_per_s:.3g} steps/s"])


class Stages(Bars):
    """Shows one line per stage, with the plan that is tried and the results so far."""

    def __init__(self, console: Console) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        super().__init__(console)
        self.bars = Progress(
            SpinnerColumn("dots" if console.encoding.startswith("utf") else "line", finished_text=" "),
            TextColumn("{task.description}", markup=False, table_column=Column(min_width=13, no_wrap=True)),
            TimeElapsedColumn(),
            TextColumn(
                "{task.fields[figures]}", markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            console=console, expand=True,
        )  # fmt: skip
        self._stage = ""

    def __call__(self, event: Any) -> None:
        """Show an event."""
        task = self._tasks.get((event.stage, ""))
        over = task is not None and event.stage == self._stage and event.done == event.total == 1
        if task is None or event.stage != self._stage:
            self.bars.start()
            for known in self.bars.tasks:
                self.bars.update(known.id, completed=1, total=1)
            task = self._tasks[event.stage, ""] = self.bars.add_task(event.stage, total=1, figures="")
            self._stage = event.stage
        self.bars.update(task, completed=1 if over else 0, figures="" if over else event.message)


@contextlib.contextmanager
def bars(stages: bool = False) -> Iterator[Bars | Lines]:
    """Yield a display of events: a bar per stage and subject, or a line per stage. Nothing appears before the first event."""
    from rich.console import Console

    class Unread(Console):
        def on_broken_pipe(self) -> None:  # rich's own method would end the process
            self.quiet = True

    console = Unread(stderr=True)  # created each time, since standard error may have been replaced
    if not (console.is_terminal or console.is_jupyter):
        yield Lines(console, stages)
        return
    shown = (Stages if stages else Bars)(console)
    try:
        yield shown
    finally:
        if shown.bars.tasks:
            shown.bars.stop()
