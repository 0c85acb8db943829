"""What the commands do: each job joins workloads, measurement and reports, and prints nothing itself.

A job tells how far it is through a callback that takes :class:`Event` records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Event", "Progress"]


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
