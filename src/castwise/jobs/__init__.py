"""What the commands do: each job joins workloads, measurement and reports, and prints nothing itself.

A job tells how far it is through a callback that takes :class:`Event` records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from castwise.errors import PlanError

__all__ = ["Event", "Progress", "heard"]


@dataclass(frozen=True)
class Event:
    """How far one part of a job has come.

    Attributes:
        stage: What is being done, such as ``training`` or ``memory``.
        subject: What it is done to: usually a plan's name.
        total: Units to do in all, such as steps; ``done == total`` is the last event of this stage and subject.
        message: Something worth telling, such as why a plan was stopped; else empty.
    """

    stage: str
    subject: str
    done: int
    total: int
    message: str = ""


Progress = Callable[[Event], None]


@contextlib.contextmanager
def heard(progress: Progress | bool | None, stages: bool = False) -> Iterator[Progress]:
    """What a job calls with its events: a user's function; bars on standard error for True; nothing for False or None.

    Raises:
        PlanError: Something else.
    """
    if progress is True:
        from castwise.report.progress import bars

        with bars(stages) as shown:
            yield shown
    elif progress is None or progress is False:
        yield lambda _event: None
    elif callable(progress):
        yield progress
    else:
        raise PlanError(f"progress={progress!r}: needs True, False, None or a function of an Event")
