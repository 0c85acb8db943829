"""Detect losses that are abnormally high for a training, by a line computed from its earlier losses."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection

KEPT = 64
"""Number of losses that the line is computed from."""
LEAST = 16
"""Minimum number of losses for a line; with fewer, only non-finite losses are abnormal."""
SPREADS = 6.0
"""A loss this many spreads above the median is suspect. The spread is the standard deviation of a normal distribution
with the same median absolute deviation."""
FAR = 12.0
"""A loss this many spreads above the median, and above all first losses of the run, has diverged at once."""
PERSISTENT = 5
"""This many suspect losses in a row mean divergence."""
FLOOR = 0.02
"""The spread is at least this share of the median: losses on one repeated batch hardly vary."""


def robust_line(losses: Collection[float]) -> tuple[float, float]:
    """The median of losses, and their spread: its estimate from the median absolute deviation, bounded below."""
    median = statistics.median(losses)
    deviation = statistics.median(abs(value - median) for value in losses)
    return median, max(1.4826 * deviation, FLOOR * abs(median), 1e-12)


class LossLine:
    """Compares each loss of a run with those before it.

    Attributes:
        suspects: The current run of suspect losses, each with its step.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._start = -math.inf
        self._seen = 0
        self.suspects: list[tuple[int, float]] = []

    def _line(self) -> tuple[float, float]:
        """Median and spread of the recent losses."""
        return robust_line([value for _, value in self._recent])

    @property
    def limit(self) -> float:
        """The largest loss that is not suspect; infinity while there is no line."""
        if len(self._recent) < LEAST:
            return math.inf
        median, spread = self._line()
        return median + SPREADS * spread

    def check(self, step: int, loss: float, made: bool = True) -> str:
        """Record a finite loss; return a clause that says why it has diverged, or an empty string if it has not.

        The losses of steps that were not made, since gradients were not finite, do not move the line. One of them alone is
        no divergence: its update did no damage.
        """
        if len(self._recent) < LEAST:
            if made:
                self._take(step, loss)
            return ""
        median, spread = self._line()
        if loss <= median + SPREADS * spread:
            for one in (*self.suspects, (step, loss)) if made else ():
                self._take(*one)  # the suspects before it were harmless
            self.suspects = []
            return ""
        self.suspects.append((step, loss))
        if made and loss > max(self._start, median) + FAR * spread:
            return f"the loss {loss:.4g} is {(loss - median) / spread:.0f} robust standard deviations above the median {median:.4g}"
        if len(self.suspects) >= PERSISTENT:
            low = min(value for _, value in self.suspects)
            return (
                f"{PERSISTENT} losses in a row are at least {low:.4g}, {(low - median) / spread:.0f} robust standard deviations "
                f"above the median {median:.4g}"
            )
        return ""

    def _take(self, step: int, loss: float) -> None:
        self._recent.append((step, loss))
        self._seen += 1
        if self._seen <= LEAST:
            self._start = max(self._start, loss)

    def last(self, since: int, step: int) -> int | None:
        """The last step from ``since`` to before ``step`` that was made with a normal loss."""
        return next((one for one, _ in reversed(self._recent) if since <= one < step), None)

    def back_to(self, step: int) -> None:
        """Discard the losses from a step on."""
        self.suspects = []
        kept = [one for one in self._recent if one[0] < step]
        self._seen -= len(self._recent) - len(kept)
        self._recent = deque(kept, maxlen=KEPT)
