"""Counts steps and recent skips per optimizer, and decides which steps are sampled."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from castwise.lab.watch.history import History
from castwise.lab.watch.statistics import Update

RECENT = 64
"""Number of steps over which the share of skipped ones is computed."""
MEDIAN_OF = 32
"""Number of samples over which the median gradient norm is computed."""
JUMP = 8.0
"""A learning rate that grows by more than this factor in one step is a reason for a sample."""
DECAYED = 20.0
"""A learning rate below the peak divided by this is low: from there it may fall to 0."""
LEAST = 8
"""Minimum number of samples for that median."""


@dataclass(eq=False)
class Turn:
    """The steps of one optimizer.

    Attributes:
        number: Its index among the session's optimizers.
        every: Steps between two samples; the first samples are closer together, at 1, 2, 4, 8, ..., and so are those after a
            suspicious one.
        steps: Number of steps so far, skipped ones included.
        streak: Number of steps skipped in a row.
        made: Whether any step was not skipped.
        due: Whether the next step is a sample.
        update: Statistics of the current step.
        closure: Whether the current step computes its gradients itself.
        skips: The session's number of skipped steps when the current step started.
        gap: Steps between the last two samples, if the last one was suspicious; else 0.
        sampled: The last sampled step.
        rate: The largest learning rate of its groups at the last step.
        peak: The largest learning rate so far.
        decayed: Whether the learning rate has fallen gradually to a small share of the peak, or to 0 from there.
        extra: A step that is sampled in addition to the regular samples.
        ratios: By module, the update of the last sampled step over the weights.
        history: The earlier samples.
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
    gap: int = 0
    sampled: int = 0
    rate: float = 0.0
    peak: float = 0.0
    decayed: bool = False
    extra: int = -1
    ratios: dict[str, float] = field(default_factory=dict)
    history: History = field(default_factory=History)
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_OF))

    def __post_init__(self) -> None:
        """Decide whether the first step is a sample."""
        self._plan()

    def _plan(self) -> None:
        step = self.steps + 1
        self.due = (
            step % self.every == 0 or (step < self.every and step & (step - 1) == 0) or step == self.extra
        )

    def suspect(self, suspicious: bool) -> None:
        """After a sample: if it is suspicious, the next samples follow after 1, 2, 4, ... steps."""
        self.gap = (2 * self.gap or 1) if suspicious else 0
        self.extra = self.steps + self.gap if suspicious else -1
        self._plan()

    def note_rate(self, rates: Sequence[float]) -> bool:
        """Note the learning rates of the next step; return whether the largest has jumped up, or down to 0."""
        before, self.rate = self.rate, max(rates)
        if self.rate == before:
            return False
        self.peak = max(self.peak, self.rate)
        low = self.peak / DECAYED
        self.decayed = self.rate <= low and (self.decayed or self.rate > 0.0 or before <= low)
        return 0.0 < before < self.rate / JUMP or (self.rate == 0.0 and not self.decayed)

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
