"""Result of a training, as frozen data that turns into JSON and a sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from castwise.commands.jobs import Event
from castwise.lab.result import Result
from castwise.lab.timing.environment import Environment


@dataclass(frozen=True)
class TrainEvent(Event):
    """Progress of a training.

    Attributes:
        loss: Of the last step that was read.
        loss_scale: That step's; None under a plan without one.
        skipped_steps: Steps not taken so far, since gradients were not finite.
        steps_per_s: Since the start.
    """

    loss: float = math.nan
    loss_scale: float | None = None
    skipped_steps: int = 0
    steps_per_s: float = 0.0


@dataclass(frozen=True)
class TrainResult(Result):
    """Result of a training.

    Attributes:
        plan: On one line, as ``Plan.parse`` reads it.
        status: ``ok``, ``failed`` or ``interrupted``.
        reason: Why it is not ``ok``, in a sentence; else empty.
        steps_done: Steps made, skipped ones and those before a checkpoint that was resumed too.
        steps_before: Those of them that were made before that checkpoint.
        skipped_steps: Steps not taken, since gradients were not finite.
        restored_buffers: How often each buffer got its last finite values back after one of them, since the start or the checkpoint.
        final_loss: Of the last step, None where it is not finite.
        loss_scale: In the last step; None under a plan without one.
        metrics: What ``workload.evaluate`` says of the trained model.
        layout: What the processes shared out, such as ``dp2``; ``single`` for one process.
        time_s: Of the training itself, without preparation and evaluation.
        steps_per_s: Steps made since the start or the checkpoint, over that time.
        files: Names of what was written beside ``result.json``, in its folder.
    """

    kind: ClassVar[str] = "train"
    workload: str
    description: str
    plan: str
    digest: str
    status: str
    reason: str
    steps: int
    steps_done: int
    steps_before: int
    skipped_steps: int
    restored_buffers: Mapping[str, int]
    final_loss: float | None
    loss_scale: float | None
    metrics: Mapping[str, float]
    seed: int
    layout: str
    world_size: int
    time_s: float
    steps_per_s: float
    environment: Environment
    files: tuple[str, ...]

    def summary(self) -> str:
        """The outcome in a sentence."""
        from castwise.report.train import summary

        return summary(self.to_dict())
