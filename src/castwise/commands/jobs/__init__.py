"""The jobs behind the commands, such as ``tune`` and ``bench``. They measure and return results, and print nothing.

A job reports its progress by calling a function with :class:`Event` records.
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
    """A report on the progress of a job.

    Attributes:
        stage: The name of the running stage, such as ``training`` or ``memory``.
        subject: What the stage works on, usually the name of a plan.
        total: The total number of units, such as steps. The last event of a stage and subject has ``done == total``.
        message: A message to the user, such as why a plan was stopped, or an empty text.
    """

    stage: str
    subject: str
    done: int
    total: int
    message: str = ""


Progress = Callable[[Event], None]


class _Broken(BaseException):
    """Raised if the user's progress function raised the error ``__cause__``.

    It is no ``Exception``, since jobs catch exceptions of workloads and plans.
    """


def _tell(progress: Progress, event: Event) -> None:
    try:
        progress(event)
    except Exception as error:
        raise _Broken from error


@contextlib.contextmanager
def heard(progress: Progress | bool | None, stages: bool = False) -> Iterator[Progress]:
    """Yield the function that a job calls to report progress, as the user's argument ``progress`` asks.

    ``progress`` is the user's function, True for progress bars on standard error, or False or None for no output. If
    the user's function raises an error, the job ends with the same error, and blames no workload or plan.

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
    """Create a job's output folder. Jobs call this before their work starts, so that no result is lost.

    Raises:
        PlanError: The folder cannot be created or written to. The message begins with ``call``, which names the user's
            argument.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise PlanError(
            f"{call}: {error.strerror}: {str(folder)!r}; give a writable folder, or one that can be created"
        ) from error
