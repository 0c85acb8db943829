"""Results of a bench, as frozen data that turns into a table, JSON and a page."""

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
"""A plan is not recommended if its final loss is above the baseline's by this part of what that one gained."""


@dataclass(frozen=True)
class Timing:
    """Seconds per step of one plan over rounds, the speed against the baseline (None for itself), and all times by start.

    Where all plans were timed in one process there is one start, and None in rounds that a plan did not run.
    """

    step: stats.Summary
    speedup: stats.Ratio | None
    starts_s: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class PlanResult:
    """Results of one plan.

    Attributes:
        name: A preset, the folder or file that the plan was read from, or the plan in words.
        plan: The plan on one line, as ``Plan.parse`` reads it.
        status: ``ok``; ``stopped`` (hopeless); ``unsupported`` (the device or model cannot run it); ``failed``.
        reason: Why it is not ``ok``, in a sentence; else empty.
        training: Times of training steps, where there were enough.
        inference: Times of inference calls, where they were asked for and worked.
        memory: Peaks and saved bytes, where they were asked for and could be measured.
        notes: What else went wrong, in sentences.
        skipped_steps: Steps not taken since gradients were not finite.
        final_loss_difference: Of the last loss from the baseline's.
        metrics: What ``workload.evaluate`` says of the trained model.
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
        """Speed of training over the baseline's."""
        return self.training.speedup if self.training is not None else None


@dataclass(frozen=True)
class BenchResult(Result):
    """Plans side by side on one workload and one machine.

    Attributes:
        baseline: Name of the plan that the others are compared with.
        steps: Training steps each plan took.
        rounds: Interleaved rounds the times come from, over all starts.
        starts: How often each plan was started to be timed, in a process of its own; 0 where all were timed in one process.
        plans: A row per plan, in the order given, the baseline first if it was added.
        images: ``target`` and a prediction per plan, rows of numbers, for workloads that have a picture.
        notes: What else is to be known of all plans, in sentences.
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
        """Plans whose loss fell visibly less than the baseline's in the same steps, or is not finite."""
        base = next(row.losses for row in self.plans if row.name == self.baseline)
        return tuple(row.name for row in self.plans if row.status == "ok" and _learned_less(row.losses, base))

    @property
    def best(self) -> str | None:
        """The recommended plan; None if no plan that learns as well as the baseline is measurably faster."""
        return next(iter(self._best()), None)

    @property
    def level_with_best(self) -> tuple[str, ...]:
        """Other plans faster than the baseline whose speed is indistinguishable from the best."""
        return self._best()[1:]

    def _best(self) -> tuple[str, ...]:
        """The best plan and those level with it.

        Of those that the rounds do not tell from the fastest, the first that was asked for is the best: on a second run the
        fastest may be another, the answer should not.
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
            folder: Where to; made if it does not exist.

        Returns:
            Paths of the files: ``bench.html`` first, then ``bench.json`` and the pictures; where matplotlib or Jinja is
            missing no page and pictures, and a warning says so.
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
    """Whether the times of two plans do not show which is faster."""
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
