"""Steps of each optimizer: how many there were, how many of the last were skipped, and when one is looked at."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from castwise.lab.watch.statistics import Update

RECENT = 64
"""Steps over which the share of skipped ones is taken."""
MEDIAN_OF = 32
"""Samples over which the median of gradient norms is taken."""
LEAST = 8
"""Samples that there must be before."""


@dataclass(eq=False)
class Turn:
    """The steps of one optimizer.

    Attributes:
        number: Its place among the session's optimizers.
        every: Steps between two samples; at first they come closer, at 1, 2, 4, 8, ...
        steps: So far, skipped ones too.
        streak: Skipped in a row.
        made: Whether any was made.
        due: Whether the next step is a sample.
        update: What is being looked at.
        closure: Whether that step computes its gradients itself.
        skips: Skipped steps of the session when it began.
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
        """Say whether the first step is a sample."""
        self._plan()

    def _plan(self) -> None:
        step = self.steps + 1
        self.due = step % self.every == 0 or (step < self.every and step & (step - 1) == 0)

    def count(self, skipped: bool | None) -> None:
        """Take note of a step; None where only the device knows whether it was skipped."""
        self.steps += 1
        self._plan()
        if skipped is None:
            return
        self.recent.append(skipped)
        self.streak = self.streak + 1 if skipped else 0
        self.made = self.made or not skipped

    def over_median(self, norm: float | None) -> float | None:
        """A gradient norm over the median of those before; None while these are few."""
        if norm is None:
            return None
        before = sorted(self.norms)
        if math.isfinite(norm):
            self.norms.append(norm)
        if len(before) < LEAST or not before[len(before) // 2] > 0:
            return None
        return norm / before[len(before) // 2]
