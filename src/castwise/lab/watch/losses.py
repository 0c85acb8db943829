"""Detect losses that are abnormally high for a training, by a limit computed from its earlier losses."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection

KEPT = 64
"""Number of earlier losses from which the limit is computed."""
LEAST = 16
"""Number of losses from which on there is a limit. Before that, only non-finite losses are abnormal."""
SPREADS = 6.0
"""A loss this many spreads above the median is suspect. The spread is the standard deviation of a normal distribution with the
same median absolute deviation."""
FAR = 12.0
"""A single loss this far above the median, in spreads, means divergence, if it is also so far above all first losses."""
PERSISTENT = 5
"""This many suspect losses in a row mean divergence."""
FLOOR = 0.02
"""The spread is at least this share of the median, because losses on one repeated batch hardly vary."""


def robust_line(losses: Collection[float]) -> tuple[float, float]:
    """Return the median of losses and their spread: a robust standard deviation from the median absolute deviation."""
    median = statistics.median(losses)
    deviation = statistics.median(abs(value - median) for value in losses)
    return median, max(1.4826 * deviation, FLOOR * abs(median), 1e-12)


class LossLine:
    """Compares each loss of a run with earlier losses, and detects divergence.

    Attributes:
        suspects: The latest suspect losses without a normal loss between them, each with its step.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._start = -math.inf
        self._seen = 0
        self.suspects: list[tuple[int, float]] = []

    def _line(self) -> tuple[float, float]:
        """Return the median and the spread of the recent losses."""
        return robust_line([value for _, value in self._recent])

    @property
    def limit(self) -> float:
        """The largest loss that is not suspect; infinity while there are too few losses."""
        if len(self._recent) < LEAST:
            return math.inf
        median, spread = self._line()
        return median + SPREADS * spread

    def check(self, step: int, loss: float, made: bool = True) -> str:
        """Record a finite loss, and return a clause that says why the run has diverged; empty if it has not.

        Set ``made`` to False for a step that was skipped because gradients were not finite. Its loss does not change the
        median. Alone, it is no divergence, because its update did no damage.
        """
        if len(self._recent) < LEAST:
            if made:
                self._take(step, loss)
            return ""
        median, spread = self._line()
        if loss <= median + SPREADS * spread:
            for one in (*self.suspects, (step, loss)) if made else ():
                self._take(*one)  # the suspect losses before this normal loss were harmless
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
        """Return the last step from ``since`` to before ``step`` that was made with a normal loss; None if there is none."""
        return next((one for one, _ in reversed(self._recent) if since <= one < step), None)

    def back_to(self, step: int) -> None:
        """Discard the losses of this step and all later steps."""
        self.suspects = []
        kept = [one for one in self._recent if one[0] < step]
        self._seen -= len(self._recent) - len(kept)
        self._recent = deque(kept, maxlen=KEPT)
