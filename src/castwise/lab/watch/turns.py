"""Count the steps and recent skips of each optimizer, and decide which steps are sampled."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from castwise.lab.watch.history import History
from castwise.lab.watch.statistics import Update

RECENT = 64
"""Number of steps over which the share of skipped steps is computed."""
MEDIAN_OF = 32
"""Number of samples over which the median gradient norm is computed."""
JUMP = 8.0
"""A step is sampled if the learning rate grows by more than this factor before it."""
DECAYED = 20.0
"""A learning rate is low if it is below the largest so far divided by this. A low learning rate may fall to 0 in one step."""
LEAST = 8
"""Number of samples from which on the median gradient norm is used."""


@dataclass(eq=False)
class Turn:
    """Counts the steps of one optimizer, and decides which of them are sampled.

    Attributes:
        number: Index of the optimizer among the session's optimizers.
        every: Steps between two samples. The first samples are closer together, at steps 1, 2, 4, 8, ..., and so are the
            samples after a suspicious sample.
        steps: Number of steps so far, including skipped steps.
        streak: Number of steps skipped in a row.
        made: Whether any step was not skipped.
        due: Whether the next step is sampled.
        update: Statistics of the current step.
        closure: Whether the current step computes its gradients itself, by a closure.
        skips: The session's number of skipped steps when the current step started.
        gap: Steps until the next sample, if the last sample was suspicious; else 0.
        sampled: The last sampled step.
        rate: The largest learning rate of the optimizer's parameter groups at the last step.
        peak: The largest learning rate so far.
        decayed: Whether the learning rate has fallen gradually to a small share of the largest so far, or to 0 from there.
        extra: A step that is sampled in addition to the regular samples.
        ratios: By module, the update of the last sampled step divided by the weights.
        history: The gradient norms of earlier samples.
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
        """Decide after a sample when the next follows: after suspicious samples in a row, after 1, 2, 4, ... steps."""
        self.gap = (2 * self.gap or 1) if suspicious else 0
        self.extra = self.steps + self.gap if suspicious else -1
        self._plan()

    def note_rate(self, rates: Sequence[float]) -> bool:
        """Record the learning rates of the next step, and return whether the largest has jumped up, or down to 0."""
        before, self.rate = self.rate, max(rates)
        if self.rate == before:
            return False
        self.peak = max(self.peak, self.rate)
        low = self.peak / DECAYED
        self.decayed = self.rate <= low and (self.decayed or self.rate > 0.0 or before <= low)
        return 0.0 < before < self.rate / JUMP or (self.rate == 0.0 and not self.decayed)

    def count(self, skipped: bool | None) -> None:
        """Count a step. ``skipped`` is None if only the device knows whether the step was skipped."""
        self.steps += 1
        self._plan()
        if skipped is None:
            return
        self.recent.append(skipped)
        self.streak = self.streak + 1 if skipped else 0
        self.made = self.made or not skipped

    def over_median(self, norm: float | None) -> float | None:
        """Return a gradient norm divided by the median of earlier gradient norms; None while there are too few."""
        if norm is None:
            return None
        before = sorted(self.norms)
        if math.isfinite(norm):
            self.norms.append(norm)
        if len(before) < LEAST or not before[len(before) // 2] > 0:
            return None
        return norm / before[len(before) // 2]
