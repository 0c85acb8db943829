"""Result of a training: a frozen dataclass that converts to JSON and a sentence."""

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
        loss: Loss of the last step that was read.
        loss_scale: Loss scale of that step; None if the plan has none.
        skipped_steps: Number of steps skipped so far because of non-finite gradients.
        steps_per_s: Steps per second since the start.
    """

    loss: float = math.nan
    loss_scale: float | None = None
    skipped_steps: int = 0
    steps_per_s: float = 0.0


@dataclass(frozen=True)
class TrainResult(Result):
    """Result of a training.

    Attributes:
        plan: The plan on one line, as ``Plan.parse`` reads it.
        status: ``ok``, ``failed`` or ``interrupted``.
        reason: Why the status is not ``ok``, in a sentence; else empty.
        steps_done: Number of steps, including skipped steps and steps before the resumed checkpoint.
        steps_before: Number of steps before the resumed checkpoint.
        skipped_steps: Number of steps skipped because of non-finite gradients.
        restored_buffers: How often each buffer was restored to its last finite values after a skipped step, since the
            start or the checkpoint.
        final_loss: Loss of the last step; None if it is non-finite.
        loss_scale: Loss scale of the last step; None if the plan has none.
        metrics: Result of ``workload.evaluate`` for the trained model.
        layout: The parallel layout, such as ``dp2``; ``single`` for one process.
        time_s: Time of the training itself in seconds, without preparation and evaluation.
        steps_per_s: Number of steps since the start or the checkpoint, divided by ``time_s``.
        files: Names of the other files in the folder of ``result.json``.
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
