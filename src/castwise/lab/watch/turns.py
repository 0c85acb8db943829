"""Counts steps and recent skips per optimizer, and decides which steps are sampled."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from castwise.lab.watch.statistics import Update

RECENT = 64
"""Number of steps over which the share of skipped ones is computed."""
MEDIAN_OF = 32
"""Number of samples over which the median gradient norm is computed."""
LEAST = 8
"""Minimum number of samples for that median."""


@dataclass(eq=False)
class Turn:
    """The steps of one optimizer.

    Attributes:
        number: Its index among the session's optimizers.
        every: Steps between two samples; the first samples are closer together, at 1, 2, 4, 8, ...
        steps: Number so far, skipped ones included.
        streak: Number skipped in a row.
        made: Whether any step was not skipped.
        due: Whether the next step is a sample.
        update: Statistics of the current step.
        closure: Whether that step computes its gradients itself.
        skips: The session's number of skipped steps when it started.
    """

    number: int
    every: int
    steps: int = 0
    streak: int = 0
    made: bool = False
    due: bool = False
    update: Update | None = None
    closure: bool = False
    skips: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_OF))

    def __post_init__(self) -> None:
        """Decide whether the first step is a sample."""
        self._plan()

    def _plan(self) -> None:
        step = self.steps + 1
        self.due = step % self.every == 0 or (step < self.every and step & (step - 1) == 0)

    def count(self, skipped: bool | None) -> None:
        """Count a step; None if only the device knows whether it was skipped."""
        self.steps += 1
        self._plan()
        if skipped is None:
            return
        self.recent.append(skipped)
        self.streak = self.streak + 1 if skipped else 0
        self.made = self.made or not skipped

    def over_median(self, norm: float | None) -> float | None:
        """A gradient norm divided by the median of earlier ones; None while there are too few."""
        if norm is None:
            return None
        before = sorted(self.norms)
        if math.isfinite(norm):
            self.norms.append(norm)
        if len(before) < LEAST or not before[len(before) // 2] > 0:
            return None
        return norm / before[len(before) // 2]
