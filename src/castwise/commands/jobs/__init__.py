"""Jobs behind the commands: each combines workloads, measurements and reports, and prints nothing.

A job reports progress through a callback that takes :class:`Event` records.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from castwise.errors import PlanError

__all__ = ["Event", "Progress", "heard", "make_folder"]


@dataclass(frozen=True)
class Event:
    """Progress of one part of a job.

    Attributes:
        stage: Name of the stage, such as ``training`` or ``memory``.
        subject: Subject of the stage, usually a plan's name.
        total: Total number of units, such as steps; ``done == total`` is the last event of this stage and subject.
        message: Message to the user, such as why a plan was stopped; else empty.
    """

    stage: str
    subject: str
    done: int
    total: int
    message: str = ""


Progress = Callable[[Event], None]


class _Broken(BaseException):
    """A user's progress function failed; see ``__cause__``. Not an ``Exception``, since jobs catch those."""


def _tell(progress: Progress, event: Event) -> None:
    try:
        progress(event)
    except Exception as error:
        raise _Broken from error


@contextlib.contextmanager
def heard(progress: Progress | bool | None, stages: bool = False) -> Iterator[Progress]:
    """Yield a job's progress callback: the user's function, bars on standard error for True, or no output.

    An error in the user's function propagates out of the job unchanged, and is not attributed to a workload or a plan.

    Raises:
        PlanError: ``progress`` is something else.
    """
    if progress is True:
        from castwise.report.progress import bars

        with bars(stages) as shown:
            yield shown
    elif progress is None or progress is False:
        yield lambda _event: None
    elif callable(progress):
        try:
            yield partial(_tell, progress)
        except _Broken as broken:
            cause = broken.__cause__
            assert cause is not None
            for note in getattr(broken, "__notes__", ()):
                cause.add_note(note)
            raise cause from None
    else:
        raise PlanError(f"progress={progress!r}: needs True, False, None or a function that takes an Event")


def make_folder(folder: Path, call: str) -> None:
    """Create the output folder before the work starts, so that no result is lost.

    Raises:
        PlanError: The folder cannot be created or written to; the message names ``call``, the user's argument.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise PlanError(
            f"{call}: {error.strerror}: {str(folder)!r}; give a writable folder, or one that can be created"
        ) from error
