"""Statistics of repeated times: pure functions of numbers, free of torch.

Times on a shared machine have a long right tail and drift slowly. So the centre is a median, the spread an
interquartile range, and two candidates are compared by the ratios of times taken next to each other, where the
drift cancels.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of ``n`` repeated times, in seconds."""

    median_s: float
    q1_s: float
    q3_s: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """A ratio, the median of ``n`` pairs' ratios, with the interval that covers the truth with probability ``level``."""

    value: float
    low: float
    high: float
    level: float
    n: int

    @property
    def is_tie(self) -> bool:
        """Whether the interval contains 1: the measurement does not tell which of the two is faster."""
        return self.low <= 1.0 <= self.high


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q``-quantile by linear interpolation between order statistics (type 7, NumPy's default).

    Raises:
        ValueError: No values, or ``q`` not within 0 and 1.
    """
    if not values or not 0.0 <= q <= 1.0:
        raise ValueError(
            f"quantile(values of length {len(values)}, q={q}): needs one value or more and 0 <= q <= 1"
        )
    return float(np.quantile(values, q))


def summarise(times_s: Sequence[float]) -> Summary:
    """Median and quartiles of at least one time in seconds."""
    median, low, high = (quantile(times_s, q) for q in (0.5, 0.25, 0.75))
    return Summary(median, low, high, len(times_s))


def paired_speedup(
    baseline_s: Sequence[float],
    candidate_s: Sequence[float],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Ratio:
    """How many times as fast as the baseline a candidate is, from times taken in the same rounds.

    The estimate is the median over rounds of baseline / candidate. The interval is the wider, end by end, of two:
    the percentile bootstrap over rounds, and the interval between order statistics that covers a median whatever
    the distribution. With a dozen rounds the bootstrap alone covers too little (about 92 % where 95 % is claimed).

    The same times, in seconds, and seed give the same interval. With fewer than six pairs none reaches 95 %: the one
    returned is the range of the pairs, and its ``level`` says how often such a range covers the truth.

    Raises:
        ValueError: No pairs, lists of different lengths, or times that are not positive and finite.
    """
    if not baseline_s or len(baseline_s) != len(candidate_s):
        raise ValueError(
            f"paired_speedup: {len(baseline_s)} baseline and {len(candidate_s)} candidate times; needs as many of "
            "each, at least one, from the same rounds"
        )
    if not all(math.isfinite(t) and t > 0 for t in (*baseline_s, *candidate_s)):
        raise ValueError("paired_speedup: every time must be a positive finite number of seconds")
    ratios = sorted(b / c for b, c in zip(baseline_s, candidate_s, strict=True))
    n = len(ratios)
    draw = random.Random(seed)
    medians = [statistics.median(draw.choices(ratios, k=n)) for _ in range(resamples)]
    tail = (1.0 - LEVEL) / 2.0
    outer = _order_statistic(n, tail)
    low = min(quantile(medians, tail), ratios[outer])
    high = max(quantile(medians, 1.0 - tail), ratios[n - 1 - outer])
    return Ratio(statistics.median(ratios), low, high, min(LEVEL, 1.0 - 2.0 * 0.5**n), n)


def _order_statistic(n: int, tail: float) -> int:
    """Index k of the innermost order statistic with P(median < x_k) <= tail; 0 if none has."""
    covered, k = 0.0, 0
    for index in range(n):
        covered += math.comb(n, index) * 0.5**n
        if covered > tail:
            break
        k = index
    return k
