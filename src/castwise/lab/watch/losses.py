"""When is a loss no longer what training brings? The line that tells, from the losses so far."""

from __future__ import annotations

import math
import statistics
from collections import deque

KEPT = 64
"""Losses that the line is drawn from."""
LEAST = 16
"""Losses without which there is no line: only what is not finite stands out then."""
SPREADS = 6.0
"""A loss this many spreads above the median is suspect. The spread is that of a normal distribution with the same median
absolute deviation."""
FAR = 12.0
"""A loss this many spreads above the median, and above all first losses of the run, has diverged at once."""
PERSISTENT = 5
"""So many suspects in a row have diverged."""
FLOOR = 0.02
"""The spread is at least this share of the median: losses on one batch again and again hardly vary."""


class LossLine:
    """Compares each loss of a run with those before it.

    Attributes:
        suspects: The suspects in a row just now, each with its step.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._start = -math.inf
        self._seen = 0
        self.suspects: list[tuple[int, float]] = []

    def _line(self) -> tuple[float, float]:
        """Median and spread of the losses so far."""
        values = [value for _, value in self._recent]
        median = statistics.median(values)
        deviation = statistics.median(abs(value - median) for value in values)
        return median, max(1.4826 * deviation, FLOOR * abs(median), 1e-12)

    @property
    def limit(self) -> float:
        """The largest loss that is no suspect; infinity where there is no line yet."""
        if len(self._recent) < LEAST:
            return math.inf
        median, spread = self._line()
        return median + SPREADS * spread

    def check(self, step: int, loss: float) -> str:
        """Take note of a finite loss; what is wrong with it, in a clause, where it has diverged, else empty."""
        if len(self._recent) < LEAST:
            self._take(step, loss)
            return ""
        median, spread = self._line()
        if loss <= median + SPREADS * spread:
            for one in (*self.suspects, (step, loss)):
                self._take(*one)  # those before were harmless
            self.suspects = []
            return ""
        self.suspects.append((step, loss))
        if loss > max(self._start, median) + FAR * spread:
            return f"the loss is {loss:.4g}, {(loss - median) / spread:.0f} spreads above the median {median:.4g}"
        if len(self.suspects) >= PERSISTENT:
            low = min(value for _, value in self.suspects)
            return f"{PERSISTENT} losses in a row are above {low:.4g}, {(low - median) / spread:.0f} spreads above the median {median:.4g}"
        return ""

    def _take(self, step: int, loss: float) -> None:
        self._recent.append((step, loss))
        self._seen += 1
        if self._seen <= LEAST:
            self._start = max(self._start, loss)

    def back_to(self, step: int) -> None:
        """Forget the losses from a step on."""
        self.suspects = []
        kept = [one for one in self._recent if one[0] < step]
        self._seen -= len(self._recent) - len(kept)
        self._recent = deque(kept, maxlen=KEPT)
