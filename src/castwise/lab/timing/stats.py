"""Compute statistics of repeated times, with pure functions of numbers and without torch.

Times on a shared machine have a long right tail and drift slowly. So the centre is a median and the spread an
interquartile range. Two candidates are compared by the ratios of times that were taken next to each other, in which the
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
    """The median and quartiles of ``n`` repeated times, in seconds."""

    median_s: float
    q1_s: float
    q3_s: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """The ratio of two quantities, from ``n`` pairs of measurements, with an interval of coverage ``level``."""

    value: float
    low: float
    high: float
    level: float
    n: int

    @property
    def is_tie(self) -> bool:
        """Whether the interval contains 1: the measurement does not show which of the two is faster."""
        return self.low <= 1.0 <= self.high


def quantile(values: Sequence[float], q: float) -> float:
    """Return the ``q``-quantile by linear interpolation between order statistics (type 7, NumPy's default).

    Raises:
        ValueError: No values, or ``q`` not within 0 and 1.
    """
    if not values or not 0.0 <= q <= 1.0:
        raise ValueError(
            f"quantile(values of length {len(values)}, q={q}): needs one value or more and 0 <= q <= 1"
        )
    return float(np.quantile(values, q))


def summarise(times_s: Sequence[float]) -> Summary:
    """Return the median and quartiles of times in seconds, of which there must be at least one."""
    median, low, high = (quantile(times_s, q) for q in (0.5, 0.25, 0.75))
    return Summary(median, low, high, len(times_s))


def paired_speedup(
    baseline_s: Sequence[float],
    candidate_s: Sequence[float],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Ratio:
    """Estimate how many times as fast as the baseline a candidate is, from times in seconds taken in the same rounds.

    The estimate is the median over rounds of baseline / candidate. Two intervals are computed: the percentile bootstrap over
    rounds, and the interval between order statistics that covers a median whatever the distribution. Each end of the result is the
    wider of the two, since with a dozen rounds the bootstrap alone covers too little.

    The same times and the same seed give the same interval. With fewer than six pairs no distribution-free interval reaches 95 %.
    The interval is then Student's t interval of the log ratios, widened to contain all ratios. With one pair the interval is from 0
    to infinity.

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
    if 2.0 * 0.5**n > 1.0 - LEVEL:
        return _of_few(ratios)
    draw = random.Random(seed)
    medians = [statistics.median(draw.choices(ratios, k=n)) for _ in range(resamples)]
    tail = (1.0 - LEVEL) / 2.0
    outer = _order_statistic(n, tail)
    low = min(quantile(medians, tail), ratios[outer])
    high = max(quantile(medians, 1.0 - tail), ratios[n - 1 - outer])
    return Ratio(statistics.median(ratios), low, high, LEVEL, n)


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Estimate the ratio of two sums over ``n`` samples, with Student's t interval of the jackknife over samples.

    Each sample contributes to both sums. The interval ends at 0 at the lowest. With one sample it is from 0 to infinity. If the
    lower sum is 0, the ratio is 0 if the upper sum is 0 too, and otherwise infinite. With infinite values above, so is the interval.

    Raises:
        ValueError: No samples, or lists of different lengths.
    """
    n = len(above)
    if not n or n != len(below):
        raise ValueError(f"ratio_of_sums: {n} and {len(below)} values; needs as many of each, at least one")
    a, b = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    value = _quotient(float(a.sum()), float(b.sum()))
    if not np.isfinite(a).all():
        return Ratio(math.inf, math.inf, math.inf, LEVEL, n)
    if n == 1:
        return Ratio(value, 0.0, math.inf, LEVEL, n)
    without = [_quotient(float(a.sum() - a[at]), float(b.sum() - b[at])) for at in range(n)]
    if not math.isfinite(value) or not all(map(math.isfinite, without)):
        return Ratio(value, min(value, *without), math.inf, LEVEL, n)
    quantiles = _T[LEVEL]
    half = quantiles[min(n - 1, len(quantiles)) - 1] * math.sqrt((n - 1) * statistics.pvariance(without))
    return Ratio(value, max(0.0, value - half), value + half, LEVEL, n)


def _quotient(above: float, below: float) -> float:
    return above / below if below > 0.0 else math.inf if above > 0.0 else 0.0


def _of_few(ratios: Sequence[float]) -> Ratio:
    n, middle = len(ratios), statistics.median(ratios)
    if n == 1:
        return Ratio(middle, 0.0, math.inf, LEVEL, n)
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.fmean(logs), _T[LEVEL][n - 2] * statistics.stdev(logs) / math.sqrt(n)
    return Ratio(middle, min(math.exp(mean - half), *ratios), max(_exp(mean + half), *ratios), LEVEL, n)


def _order_statistic(n: int, tail: float) -> int:
    """Return the index k of the innermost order statistic with P(median < x_k) <= tail, or 0 if there is none."""
    covered, k = 0.0, 0
    for index in range(n):
        covered += math.comb(n, index) * 0.5**n
        if covered > tail:
            break
        k = index
    return k


_T = {
    0.95: (
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
        2.101, 2.093, 2.086,
    ),
    0.97: (
        21.205, 5.643, 3.896, 3.298, 3.003, 2.829, 2.715, 2.634, 2.574, 2.527, 2.491, 2.461, 2.436, 2.415, 2.397, 2.382, 2.368,
        2.356, 2.346, 2.336,
    ),
    0.975: (
        25.452, 6.205, 4.177, 3.495, 3.163, 2.969, 2.841, 2.752, 2.685, 2.634, 2.593, 2.560, 2.533, 2.510, 2.490, 2.473, 2.458,
        2.445, 2.433, 2.423,
    ),
    0.99: (
        63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898,
        2.878, 2.861, 2.845,
    ),
    0.997: (
        212.205, 18.216, 8.891, 6.435, 5.376, 4.800, 4.442, 4.199, 4.024, 3.892, 3.789, 3.706, 3.639, 3.583, 3.535, 3.494, 3.459,
        3.428, 3.401, 3.376,
    ),
}  # fmt: skip
"""Two-sided quantiles of Student's t for 1, 2, ... degrees of freedom; for more degrees, the last quantile is used, which is
slightly too large."""
LUCK = 0.02
"""Prior standard deviation of the logarithm of a start's time."""
_SHARED = 4
"""Degrees of freedom of the pooled variance of all pairs, when it is combined with each pair's own."""
ALIKE, TELLS = 1.8, 4
"""Whether the pairs of ``k`` programs vary alike over ``n`` starts is decided by Bartlett's statistic. They do if the mean of the
pairs' variances is at most ``1 + ALIKE (k - 2) / (k - 1) / (n - 1)`` times the geometric mean of the variances. Equally noisy
programs pass in four of five cases. With fewer than ``TELLS`` starts all pairs count as alike."""
STEADY, GROWS, FAR = 0.0035, 1.8, 0.06
"""For a decision, the standard deviation of a pair's log ratio may be at most ``STEADY`` times the root of the number of programs
after two starts, and ``GROWS`` times as much after each further start. If the log ratio is beyond ``FAR``, the bound grows in
proportion to it. By chance a noisy program takes the same time twice and looks quiet; within these bounds that decides few searches
wrongly (bench/results/decision-cpu.json)."""
QUIET = 0.5
"""Share of a start's rounds, the fastest, whose mean is its time: disturbances only make a round longer."""

ELSEWHEN = 0.05
"""Standard deviation, between times of day, of the log of a ratio, as a share of that log: other users' load on a machine's
memory and clock rate affects formats differently, and the starts of one search do not show it.

Source: searches of one job that chose one plan, and a race made afterwards, in bench/results: 0.042 in tune-cpu-no-amx.json and
    0.050 in the file of the day before, 0.024 in tune-cpu.json. For plans of about equal speed the deviation adds nothing.
"""


def restarts(
    times_s: Sequence[Sequence[Sequence[float]]],
    level: float = LEVEL,
    expected: bool = False,
    strict: float | None = None,
) -> dict[tuple[int, int], Ratio]:
    """Estimate the ratio of times for each pair of several programs, which were started and timed together several times.

    A program's time in a start is the mean of the faster half of the program's rounds. The mean of the log ratio of two programs over
    starts has Student's t interval. The variance of this log ratio between starts is estimated as follows:

    - If all pairs vary alike (``ALIKE``), the variance of a pair is shrunk towards the mean variance of all pairs, with the weight of
      four degrees of freedom. With three starts a pair alone has two degrees of freedom, and its interval would be half as long again
      for nothing.
    - If the pairs do not vary alike, one program is noisier than another, and each pair has its own variance.
    - If nothing was started twice, the prior ``LUCK`` of starts and the spread of a pair's rounds replace the variance.

    The variation between times of day (``ELSEWHEN``) is part of each interval.

    Args:
        times_s: For each program, start and round, the seconds > 0; an empty start means that the program did not take part.
        level: Coverage of the intervals, 0.95, 0.97, 0.975 or 0.99.
        expected: For two programs, shrink the variance towards the prior that is used when nothing was started twice.
            With False, only the variance between the programs' own starts counts. That needs more starts, but also holds if starts
            vary more than the prior expects.
        strict: For a decision, which would be wrong if a noisy program looks quiet by chance: the coverage for pairs that do not vary
            alike, one of the above or 0.997. A pair whose starts differ much (``STEADY``) then has an interval from 0 to infinity.

    Returns:
        The ratios by the indices of both programs. The interval is from 0 to infinity if two programs share no start.

    Raises:
        KeyError: The level is none of these.
    """
    logs = [[math.log(_quiet(rounds)) if rounds else None for rounds in starts] for starts in times_s]
    ratios = {
        (i, j): [a - b for a, b in zip(one, logs[j], strict=False) if a is not None and b is not None]
        for i, one in enumerate(logs)
        for j in range(i + 1, len(logs))
    }
    spread = {pair: _variance(found) for pair, found in ratios.items() if len(found) > 1}
    many = len(spread) > 1
    shared = statistics.fmean(spread.values()) if many else 2.0 * LUCK**2
    programs = len({one for pair in spread for one in pair})
    unlike = 1.0
    if many:
        unlike = shared / math.exp(statistics.fmean(math.log(max(one, _EXACT)) for one in spread.values()))
    out: dict[tuple[int, int], Ratio] = {}
    for (i, j), found in ratios.items():
        n = len(found)
        mean, half = 0.0, math.inf
        if n:
            mean = statistics.fmean(found)
            own = spread.get((i, j), 0.0)
            drawn, quantiles = 0, _T[level]
            if many and n >= TELLS and unlike > 1.0 + ALIKE * (programs - 2) / (programs - 1) / (n - 1):
                quantiles = _T[strict or level]
            elif many or expected or (i, j) not in spread:
                drawn = _SHARED
            freedom = (n - 1) + drawn
            within = 0.0 if many or not drawn else _within(times_s[i], times_s[j])
            variance = (n - 1) * own + drawn * (shared + within)
            half = quantiles[min(freedom, len(quantiles)) - 1] * math.sqrt(variance / freedom / n)
            half = math.hypot(half, _T[level][-1] * ELSEWHEN * mean)
            if (
                strict
                and n > 1
                and many
                and math.sqrt(own) > _steady(programs, n) * max(1.0, abs(mean) / FAR)
            ):
                half = math.inf
        out[i, j] = Ratio(math.exp(mean), math.exp(mean - half), _exp(mean + half), level, n)
        out[j, i] = Ratio(math.exp(-mean), math.exp(-mean - half), _exp(half - mean), level, n)
    return out


_EXACT = 1e-12
"""Smallest variance of a log ratio that is compared with others: a clock resolves no less."""


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _steady(programs: int, starts: int) -> float:
    return STEADY * math.sqrt(programs) * GROWS ** (starts - 2)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700.0 else math.inf


def _quiet(rounds_s: Sequence[float]) -> float:
    """Return the time of one start of a program: the mean of the faster half of its rounds."""
    return statistics.fmean(sorted(rounds_s)[: max(1, round(QUIET * len(rounds_s)))])


def _within(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Estimate the variance of the log ratio of two programs in a start, from the spread over rounds; infinite for one round.

    It is the variance of the median of the rounds' log ratios. The mean of the faster half of the rounds varies at most as much.
    """
    found = []
    for mine, others in zip(one, other, strict=False):
        logs = [math.log(a / b) for a, b in zip(mine, others, strict=False)]
        if len(logs) > 1:
            found.append(math.pi / 2.0 * statistics.variance(logs) / len(logs))
    return statistics.fmean(found) if found else math.inf
