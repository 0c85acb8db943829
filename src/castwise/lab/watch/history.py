"""Compare the losses of a training, and the gradient norms of its modules, with those of earlier steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

from castwise.lab.watch.losses import robust_line

LEAST = 6
"""Minimum number of earlier samples for a comparison."""
KEPT = 64
"""Number of earlier losses that are kept. Each loss is compared with their median."""
FRESH = 16
"""The median is computed again after this many losses."""
FAR = 12.0
"""A loss is high if it is this many robust standard deviations above the median and also above half of the first losses."""
IN_A_ROW = 4
"""Number of high losses in a row that raise an alarm."""
GRADIENTS = 8
"""Number of earlier gradient norms that are kept per module."""
COLLAPSED = 1e-4
"""A gradient norm below this share of the smallest earlier gradient norm counts as missing."""
SETTLED = 0.1
"""A loss below this share of the median of earlier losses is small. Gradients may then vanish together with the loss."""


class LossWatch:
    """Compares each loss with earlier losses, in about a microsecond.

    Attributes:
        high: Number of high losses in a row so far.
        normal: Number of normal losses in a row so far.
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
        """Add a loss. High and non-finite losses do not change the median."""
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
        """Whether a loss is so small that vanishing gradients are to be expected."""
        return loss is not None and loss < SETTLED * self.median


class History:
    """Keeps the gradient norms of each module from earlier samples of one optimizer."""

    def __init__(self) -> None:
        self._gradients: dict[str, deque[float]] = {}

    def lost(
        self,
        norms: Mapping[str, float | None],
        trained: Iterable[str],
        settled: bool,
        share: float = COLLAPSED,
    ) -> dict[str, float]:
        """Return, for each module, 1 if its gradient is missing or far smaller than before, else 0.

        A module is left out if it had a gradient in fewer than ``LEAST`` earlier samples, or if one of the last gradients was
        zero.

        Args:
            norms: Gradient norms of this sample.
            trained: The modules with a parameter that requires a gradient.
            settled: Whether only a missing gradient counts.
            share: A norm below this share of the smallest earlier norm counts as far smaller.
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
            del self._gradients[path]  # the module is frozen: no gradient is expected
        return out
