"""How far a job is, as bars or stages on standard error: what the command line shows, and ``progress=True`` from Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class Bars:
    """A progress bar per stage and subject of a job's events."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        def column() -> Column:
            return Column(no_wrap=True)

        self.bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=column()),
            BarColumn(bar_width=16, table_column=Column(min_width=4)),  # gives way in a narrow terminal
            MofNCompleteColumn(table_column=column()),
            TimeRemainingColumn(compact=True, table_column=column()),
            TextColumn("{task.fields[figures]}", markup=False, table_column=column()),
            console=console,
        )
        self._tasks: dict[tuple[str, str], Any] = {}

    def __call__(self, event: Any) -> None:
        """Show an event, as :class:`castwise.jobs.Event` has it; those of a training have figures too."""
        key = (event.stage, event.subject)
        figures = _figures(event)
        if key not in self._tasks:
            said = event.subject if figures else f"{event.stage} {event.subject}".strip()
            self.bars.start()  # not before there is something to show
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
    """A line per stage, with what is being tried and what is known."""

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
def bars(stages: bool = False) -> Iterator[Bars]:
    """What shows events: a bar per stage and subject, or a line per stage; nothing before the first of them."""
    from rich.console import Console

    class Unread(Console):
        def on_broken_pipe(self) -> None:  # rich's own leaves the process
            self.quiet = True

    kind = Stages if stages else Bars
    shown = kind(Unread(stderr=True))  # made anew, as standard error may have been replaced
    try:
        yield shown
    finally:
        if shown.bars.tasks:
            shown.bars.stop()
