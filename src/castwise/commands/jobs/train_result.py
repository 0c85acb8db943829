"""The result of ``castwise train``: a frozen dataclass that converts to JSON and to a sentence."""

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
    """A report on the progress of a training.

    Attributes:
        loss: The loss of the last step whose loss was read from the device.
        loss_scale: The loss scale of the same step; None if the plan has no loss scale.
        skipped_steps: The number of steps skipped so far because gradients were not finite.
        steps_per_s: The number of steps per second since the start.
    """

    loss: float = math.nan
    loss_scale: float | None = None
    skipped_steps: int = 0
    steps_per_s: float = 0.0


@dataclass(frozen=True)
class TrainResult(Result):
    """The result of ``castwise train``.

    Attributes:
        plan: The plan on one line, as ``Plan.parse`` reads it.
        status: ``ok``, ``failed`` or ``interrupted``.
        reason: A sentence that says why the status is not ``ok``, or an empty text.
        steps_done: The number of steps, including skipped steps and the steps before the resumed checkpoint.
        steps_before: The number of steps before the resumed checkpoint.
        skipped_steps: The number of steps skipped because gradients were not finite.
        restored_buffers: The number of times that each buffer was restored to its last finite values after a skipped step,
            since the start or the checkpoint.
        final_loss: The loss of the last step; None if it is not finite.
        loss_scale: The loss scale of the last step; None if the plan has no loss scale.
        metrics: The metrics of ``workload.evaluate`` for the trained model.
        layout: The parallel layout, such as ``dp2``, or ``single`` for one process.
        time_s: The time of the training itself in seconds, without preparation and evaluation.
        steps_per_s: The number of steps since the start or the checkpoint, divided by ``time_s``.
        files: The names of the other files in the folder of ``result.json``.
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
        """Return the outcome of the training in a sentence."""
        from castwise.report.train import summary

        return summary(self.to_dict())
