"""The results of :func:`castwise.bench`: frozen dataclasses that convert to a table, JSON and a page."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from castwise.lab.result import Result
from castwise.lab.timing import stats
from castwise.lab.timing.environment import Environment
from castwise.lab.timing.memory import Memory
from castwise.lab.timing.timing import Lap, speedup

BEHIND = 0.1
"""A plan is not recommended if its final loss exceeds the baseline's by this fraction of the baseline's loss
decrease."""


@dataclass(frozen=True)
class Timing:
    """The times of a plan's steps.

    A start is a process in which the plan was timed. If all plans were timed in the same process, there is a single start.

    Attributes:
        step: The seconds per step, summarised over all rounds.
        speedup: The speedup over the baseline; None for the baseline.
        starts_s: The seconds per step by start and timing round. None stands for a round in which the plan did not run.
    """

    step: stats.Summary
    speedup: stats.Ratio | None
    starts_s: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class PlanResult:
    """The measurements that :func:`castwise.bench` made of one plan.

    Attributes:
        name: The name of the preset, the name of the plan's folder or file, or a description of the plan.
        plan: The plan in its one-line text form, as ``Plan.parse`` reads it.
        digest: The SHA-256 of the plan, as in :attr:`castwise.Plan.digest`.
        status: ``ok``, or ``stopped`` because the plan was much too slow, or ``unsupported`` because the device or
            the model cannot run it, or ``failed``.
        reason: A sentence that says why the status is not ``ok``. Empty if it is ``ok``.
        training: The times of training steps. None if the plan was not trained, or too few steps were measured.
        inference: The times of inference calls. None if inference was not requested or failed.
        memory: The peak memory, and the bytes that autograd saved for backward. None if memory was not requested or
            cannot be measured.
        notes: Other problems, in sentences.
        losses: The loss of each training step.
        final_loss: The last loss. None if the plan was not trained or failed.
        final_loss_difference: The last loss minus the last loss of the baseline plan.
        skipped_steps: The number of steps that were skipped because gradients were not finite.
        metrics: The metrics of ``workload.evaluate`` for the model, after training if it was trained.
    """

    name: str
    plan: str
    digest: str
    status: str
    reason: str = ""
    training: Timing | None = None
    inference: Timing | None = None
    memory: Memory | None = None
    notes: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()
    final_loss: float | None = None
    final_loss_difference: float | None = None
    skipped_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def speedup(self) -> stats.Ratio | None:
        """The speedup of training over the baseline plan. None for the baseline, or if training was not timed."""
        return self.training.speedup if self.training is not None else None


@dataclass(frozen=True)
class BenchResult(Result):
    """The result of :func:`castwise.bench`: the time, memory and loss of each plan on a workload.

    A plan decides the formats in which a model computes and stores its weights. The baseline is ``fp32``, the plan with
    which the others are compared.

    Attributes:
        workload: The name of the workload.
        description: One sentence about the workload.
        baseline: The name of the baseline.
        steps: The number of training steps of each plan, or of inference calls if the plans were not trained.
        rounds: The number of timing rounds, over all starts. In a round, each plan runs some steps in turn.
        starts: The number of processes in which each plan was timed. It is 0 if all plans were timed in the same
            process.
        seed: The seed of weights and data.
        environment: The device and the versions of the measurement.
        plans: The results of the plans, the baseline first.
        images: For workloads with pictures, ``target`` and the prediction of each plan, as rows of numbers.
        notes: Remarks that concern all plans, in sentences.
        trains: Whether the plans were trained. If not, only inference was measured.
    """

    kind: ClassVar[str] = "bench"
    workload: str
    description: str
    baseline: str
    steps: int
    rounds: int
    starts: int
    seed: int
    environment: Environment
    plans: tuple[PlanResult, ...]
    images: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    trains: bool = True

    @property
    def behind(self) -> tuple[str, ...]:
        """The plans, by name, whose loss fell clearly less than the baseline's in the same number of steps, or is not finite."""
        base = next(row.losses for row in self.plans if row.name == self.baseline)
        return tuple(row.name for row in self.plans if row.status == "ok" and _learned_less(row.losses, base))

    @property
    def best(self) -> str | None:
        """The name of the recommended plan, which is measurably faster than the baseline and whose loss is as good, or None.

        Without training, it is measurably faster in inference, and its outputs were not compared with the baseline's.
        """
        return next(iter(self._best()), None)

    @property
    def level_with_best(self) -> tuple[str, ...]:
        """The other plans, by name, that are faster than the baseline and about as fast as the best plan.

        Their speed cannot be told apart from the best plan's.
        """
        return self._best()[1:]

    def _best(self) -> tuple[str, ...]:
        """Return the name of the best plan, then the names of the plans that are about as fast.

        Of the plans whose speed cannot be told apart from the fastest plan's, the best is the plan that the user named first.
        Another measurement may find another plan to be the fastest, but its answer should be the same.
        """
        behind = self.behind
        sound = (row for row in self.plans if row.status == "ok" and row.name not in behind)
        times = {row.name: timing for row in sound if (timing := self._timing(row)) is not None}
        speeds = {name: timing.speedup for name, timing in times.items() if timing.speedup is not None}
        faster = [name for name, speed in speeds.items() if speed.low > 1.0]
        if not faster:
            return ()
        faster.sort(key=lambda name: -speeds[name].value)

        def is_level(one: str, other: str) -> bool:
            return one == other or _are_level(times[one], times[other])

        best = next(row.name for row in self.plans if row.name in faster and is_level(row.name, faster[0]))
        return (best, *(name for name in faster if name != best and is_level(name, best)))

    def _timing(self, row: PlanResult) -> Timing | None:
        return row.training if self.trains else row.inference

    def _fields(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self), "behind": self.behind, "best": self.best, "level_with_best": self.level_with_best
        }  # fmt: skip

    def headline(self) -> str:
        """Return the answer in a sentence or two."""
        from castwise.report.bench import headline

        return headline(self.to_dict())

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write the results as a page with plots and as JSON.

        Args:
            folder: The output folder, which is created if it does not exist.

        Returns:
            The paths of the files: ``bench.html`` first, then ``bench.json`` and the pictures. Without matplotlib or Jinja,
            the page and pictures are left out with a warning.
        """
        return self._save(Path(folder) / "bench.html", Path(folder) / "bench.json")


def _learned_less(losses: Sequence[float], base: Sequence[float]) -> bool:
    if not losses or not base or not math.isfinite(base[-1]):
        return False
    if not math.isfinite(losses[-1]) or not math.isfinite(base[0]):
        return True
    return losses[-1] - base[-1] > max(BEHIND * (base[0] - base[-1]), 0.0)


def _are_level(one: Timing, other: Timing) -> bool:
    """Whether the speeds of two plans cannot be told apart."""
    mine, others = one.starts_s, other.starts_s
    if len(mine) == len(others) == 1:
        ratio = speedup(Lap(list(mine[0])), Lap(list(others[0])))
        return ratio is not None and ratio.is_tie
    times = [
        [[second for second in start if second is not None] for start in starts] for starts in (mine, others)
    ]
    return stats.restarts(times)[0, 1].is_tie
