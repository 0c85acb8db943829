"""Compare the losses of a training, and the gradient norms of its modules, with those of earlier steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

from castwise.lab.watch.losses import robust_line

LEAST = 6
"""Minimum number of earlier samples for a comparison."""
KEPT = 64
"""Number of earlier losses; each loss is compared with their median."""
FRESH = 16
"""Number of losses after which the median is computed again."""
FAR = 12.0
"""A loss this many robust standard deviations above the median is high, if it is above half of the first losses too."""
IN_A_ROW = 4
"""This many high losses in a row are a change."""
GRADIENTS = 8
"""Number of earlier gradient norms per module."""
COLLAPSED = 1e-4
"""A gradient norm below this share of the smallest of the earlier ones has collapsed."""
SETTLED = 0.1
"""A loss below this share of the earlier median is small: gradients may vanish with it."""


class LossWatch:
    """Compares each loss with those before it, in about a microsecond.

    Attributes:
        high: Number of high losses in a row so far.
        normal: Number of other finite losses in a row so far.
        above: How far the last high loss was above the median, in robust standard deviations.
        median: Median of earlier losses; minus infinity while there are too few.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=KEPT)
        self._limit = self._start = math.inf
        self.median, self._spread = -math.inf, 1.0
        self._next = 2 * LEAST
        self.high, self.normal, self.above = 0, 0, 0.0

    def add(self, loss: float) -> None:
        """Note a loss. High and non-finite ones do not move the median."""
        if loss > self._limit:
            self.high, self.normal = self.high + 1, 0
            self.above = (loss - self.median) / self._spread
        elif math.isfinite(loss):
            self.high, self.normal = 0, self.normal + 1
            self._recent.append(loss)
            self._next -= 1
            if not self._next:
                self._renew()

    def _renew(self) -> None:
        self._next = FRESH
        if self._start == math.inf:
            self._start = max(self._recent)
        self.median, self._spread = robust_line(self._recent)
        start = self._start / 2 if self._start > 0 else self._start
        self._limit = max(self.median + FAR * self._spread, start)

    def is_settled(self, loss: float | None) -> bool:
        """Whether a loss is so small that vanishing gradients are no surprise."""
        return loss is not None and loss < SETTLED * self.median


class History:
    """The gradient norms of earlier samples of one optimizer."""

    def __init__(self) -> None:
        self._gradients: dict[str, deque[float]] = {}

    def lost(
        self,
        norms: Mapping[str, float | None],
        trained: Iterable[str],
        settled: bool,
        share: float = COLLAPSED,
    ) -> dict[str, float]:
        """Per module 1 if its gradient is missing or has collapsed, else 0.

        Only modules are compared whose last ``GRADIENTS`` samples all had a gradient.

        Args:
            norms: Gradient norms of this sample.
            trained: The modules with a parameter that requires a gradient.
            settled: Whether only a missing gradient counts.
            share: A norm below this share of the smallest of the earlier ones has collapsed.
        """
        out: dict[str, float] = {}
        for path in trained:
            norm, before = norms.get(path), self._gradients.get(path, deque())
            known = len(before) >= LEAST and min(before) > 0
            gone = norm is None or (not settled and norm < share * min(before, default=0.0))
            gone = gone or (norm == 0.0 and not settled)
            if known:
                out[path] = float(gone)
            if norm is not None and math.isfinite(norm) and not (known and gone):
                self._gradients.setdefault(path, deque(maxlen=GRADIENTS)).append(norm)
        for path in [path for path in self._gradients if path not in set(trained)]:
            del self._gradients[path]  # frozen: no gradient is expected
        return out
