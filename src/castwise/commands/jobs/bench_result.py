"""Results of a bench: frozen dataclasses that convert to a table, JSON and a page."""

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
    """Seconds per step of a plan, its speedup over the baseline (None for the baseline), and all times by start.

    If all plans were timed in one process, there is one start, with None in rounds that the plan did not run.
    """

    step: stats.Summary
    speedup: stats.Ratio | None
    starts_s: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class PlanResult:
    """Results of one plan.

    Attributes:
        name: The preset, the plan's folder or file, or a description of the plan.
        plan: The plan on one line, as ``Plan.parse`` reads it.
        status: ``ok``; ``stopped`` (hopeless); ``unsupported`` (the device or model cannot run it); ``failed``.
        reason: Why the status is not ``ok``, in a sentence; else empty.
        training: Times of training steps, if there were enough.
        inference: Times of inference calls, if requested and successful.
        memory: Peak memory and saved bytes, if requested and measurable.
        notes: Other problems, in sentences.
        skipped_steps: Number of steps skipped because of non-finite gradients.
        final_loss_difference: Last loss minus the baseline's.
        metrics: Result of ``workload.evaluate`` for the trained model.
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
        """Speedup of training over the baseline."""
        return self.training.speedup if self.training is not None else None


@dataclass(frozen=True)
class BenchResult(Result):
    """Plans side by side on one workload and one machine.

    Attributes:
        baseline: Name of the baseline plan.
        steps: Number of training steps per plan.
        rounds: Number of interleaved timing rounds, over all starts.
        starts: Number of timed starts per plan, each in a new process; 0 if all plans were timed in one process.
        plans: One row per plan, in the order given; a baseline that was added comes first.
        images: For workloads with pictures: ``target`` and one prediction per plan, as rows of numbers.
        notes: Notes that concern all plans, in sentences.
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

    @property
    def behind(self) -> tuple[str, ...]:
        """Plans whose loss fell visibly less than the baseline's in the same number of steps, or is non-finite."""
        base = next(row.losses for row in self.plans if row.name == self.baseline)
        return tuple(row.name for row in self.plans if row.status == "ok" and _learned_less(row.losses, base))

    @property
    def best(self) -> str | None:
        """The recommended plan: as good a loss as the baseline and measurably faster; None if there is no such plan."""
        return next(iter(self._best()), None)

    @property
    def level_with_best(self) -> tuple[str, ...]:
        """Other plans that are faster than the baseline and indistinguishable in speed from the best."""
        return self._best()[1:]

    def _best(self) -> tuple[str, ...]:
        """The best plan and the plans level with it.

        Among the plans indistinguishable in speed from the fastest, the first given is the best: another run may have
        another fastest plan, but should give the same answer.
        """
        behind = self.behind
        sound = (row for row in self.plans if row.status == "ok" and row.name not in behind)
        faster = sorted(
            (row for row in sound if row.speedup is not None and row.speedup.low > 1.0), key=_slowness
        )
        if not faster:
            return ()
        best = min(
            (row for row in faster if row is faster[0] or _are_level(row, faster[0])), key=self.plans.index
        )
        return (best.name, *(row.name for row in faster if row is not best and _are_level(row, best)))

    def _fields(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self), "behind": self.behind, "best": self.best, "level_with_best": self.level_with_best
        }  # fmt: skip

    def headline(self) -> str:
        """The answer in a sentence or two."""
        from castwise.report.bench import headline

        return headline(self.to_dict())

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write the record, the page and its plots.

        Args:
            folder: Output folder; created if it does not exist.

        Returns:
            Paths of the files: ``bench.html`` first, then ``bench.json`` and the pictures. Without matplotlib or Jinja,
            the page and pictures are left out with a warning.
        """
        return self._save(Path(folder) / "bench.html", Path(folder) / "bench.json")


def _learned_less(losses: Sequence[float], base: Sequence[float]) -> bool:
    if not losses or not base or not math.isfinite(base[-1]):
        return False
    if not math.isfinite(losses[-1]) or not math.isfinite(base[0]):
        return True
    return losses[-1] - base[-1] > max(BEHIND * (base[0] - base[-1]), 0.0)


def _slowness(row: PlanResult) -> float:
    return -row.speedup.value if row.speedup is not None else 0.0


def _are_level(one: PlanResult, other: PlanResult) -> bool:
    """Whether two plans are indistinguishable in speed."""
    assert one.training is not None
    assert other.training is not None
    mine, others = one.training.starts_s, other.training.starts_s
    if len(mine) == len(others) == 1:
        ratio = speedup(Lap(list(mine[0])), Lap(list(others[0])))
        return ratio is not None and ratio.is_tie
    times = [
        [[second for second in start if second is not None] for start in starts] for starts in (mine, others)
    ]
    return stats.restarts(times)[0, 1].is_tie
