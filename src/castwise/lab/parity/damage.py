"""What rounding does to one update, from inner products of gradients: pure functions of small matrices.

Over K microbatches let g_k be the fp32 gradients, h_k those of a plan at the same weights, data and random draws, and
d_k = h_k - g_k. With the unbiased estimates

- S, the variance of g over batches, and G2, the square of its mean: the data's noise and its signal;
- D, the variance of d, and B2, the square of its mean: the rounding's noise and its bias;

and m microbatches per update, the *damage* is D/m / (max(G2, 0) + S/m) + max(B2, 0) / (max(G2, 0) + S/max(m, HORIZON)): the
relative error of an update, as a square. The rounding's noise is compared with the expected square of one update, noise of the
data included, since both average out over later updates. A bias does not: it is compared with what is left of the data's noise in
the mean of several microbatches, as an optimizer's momentum averages them. Otherwise a bias larger than the signal would hide in the
noise of small microbatches.

All of it follows from the K x K matrices of inner products, so gradients are computed once, and regions, weightings and
bootstrap samples cost almost nothing.

Source: the signal-to-noise view of gradients in McCandlish et al. 2018, arXiv:1812.06162.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

PASS = 0.01
"""Damage below this cannot be distinguished from the noise of the data in training runs (docs/numerics.md)."""
FAIL = 0.1
"""Damage above this shows in training runs."""
ADAM_PASS = 0.03
"""``PASS`` in units of Adam's steps."""
ADAM_FAIL = 0.3
"""``FAIL`` in units of Adam's steps."""
HORIZON = 10
"""Number of microbatches whose mean must show no bias: a momentum of 0.9 averages as many updates.

A larger number finds a smaller bias in noisier data, but leaves more sound plans undecided, since a bias of zero is not known
exactly. Source: bench/results/verdicts-cpu.json, by bench/bench_verdicts.py.
"""
LASTING = 1000
"""Number of microbatches whose mean must show no bias known to exceed the thresholds: an epoch averages as many or more."""
LEVEL = 0.95
RESAMPLES = 1000


@dataclass(frozen=True)
class Grams:
    """Inner products of gradients over K microbatches.

    Attributes:
        signal: ``[K, K]``, <g_k, g_l>.
        error: ``[K, K]``, <d_k, d_l>.
    """

    signal: Matrix
    error: Matrix

    @property
    def count(self) -> int:
        """The number of microbatches, K."""
        return len(self.signal)

    @staticmethod
    def total(parts: Iterable[Grams]) -> Grams:
        """The sums of the parts' inner products, which are the inner products of the concatenated gradients."""
        parts = list(parts)
        return Grams(
            np.sum([part.signal for part in parts], axis=0), np.sum([part.error for part in parts], axis=0)
        )


@dataclass(frozen=True)
class Estimate:
    """Damage with its components and a bootstrap interval.

    Attributes:
        value: The damage; infinite if an error is not finite.
        low: Lower end of the 95 % interval.
        high: Upper end.
        bias: max(B2, 0) over ``averaged``.
        noise: D/m over the denominator.
        signal: max(G2, 0), absolute.
        data_noise: S/m, absolute.
        denominator: signal + data_noise: the expected square of one update.
        averaged: Expected square of the mean of at least ``HORIZON`` microbatches.
        lasting: Lower bound of the bias, over the sum of the lower bound of the signal and the noise left after
            ``LASTING`` microbatches.
    """

    value: float
    low: float
    high: float
    bias: float
    noise: float
    signal: float
    data_noise: float
    denominator: float
    averaged: float
    lasting: float = 0.0


def _moments(gram: Matrix, weights: Matrix) -> tuple[Matrix, Matrix]:
    """Unbiased variance and squared mean, one per row of ``weights`` (how often each microbatch was drawn)."""
    count = weights.sum(axis=1)
    square = (weights @ np.diagonal(gram)) / count
    mean = np.einsum("bi,ij,bj->b", weights, gram, weights) / count**2
    variance = np.maximum(square - mean, 0.0) * count / (count - 1)
    return variance, mean - variance / count


def estimate(grams: Grams, per_update: int = 1, whole: Grams | None = None, seed: int = 0) -> Estimate:
    """The damage, with a percentile bootstrap over microbatches as its interval.

    A resample repeats microbatches, which makes its variances too small by (K - 1)/K on average and its squared means
    too large; both are corrected.

    Args:
        grams: Inner products of the gradients to judge, K >= 2.
        per_update: Microbatches per update, m.
        whole: Inner products of all gradients, whose update is the denominator; by default ``grams`` itself.
        seed: Seed of the bootstrap.
    """
    whole = grams if whole is None else whole
    count = grams.count
    if not np.isfinite(grams.error).all():
        variance, square = _moments(whole.signal, np.ones((1, count)))
        nan, inf = float("nan"), float("inf")
        return Estimate(inf, inf, inf, nan, nan, float(square[0]), float(variance[0]), nan, nan, inf)
    noise, bias = _positive(grams.error, per_update)
    data, signal = _positive(whole.signal, per_update)
    below, averaged = signal + data, signal + data * per_update / max(per_update, HORIZON)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1.0 / count), size=RESAMPLES)
    weights = draws[(draws > 0).sum(axis=1) > 1].astype(np.float64)
    b_noise, b_bias = _resampled(grams.error, weights)
    b_data, b_signal = _resampled(whole.signal, weights)

    def left(microbatches: int) -> Matrix:
        """The expected square of the mean of so many microbatches, by resample."""
        return np.maximum(b_signal + b_data / microbatches, np.finfo(np.float64).tiny)

    ratios = b_noise / per_update / left(per_update) + b_bias / left(max(per_update, HORIZON))
    tail = (1.0 - LEVEL) / 2.0
    low, high = (float(x) for x in np.quantile(ratios, (tail, 1.0 - tail)))
    least_bias, least_signal = (float(np.quantile(one, tail)) for one in (b_bias, b_signal))
    lasting = least_bias / max(
        least_signal + data * per_update / max(per_update, LASTING), np.finfo(np.float64).tiny
    )
    if below <= 0.0:
        value = 0.0 if bias + noise == 0.0 else math.inf
        return Estimate(value, value, value, 0.0, 0.0, signal, data, below, averaged)
    value = bias / averaged + noise / below
    return Estimate(
        value, min(low, value), max(high, value), bias / averaged, noise / below, signal, data, below, averaged, lasting
    )  # fmt: skip


def _positive(gram: Matrix, per_update: int) -> tuple[float, float]:
    """Variance of an update and squared mean, at least 0."""
    variance, square = _moments(gram, np.ones((1, len(gram))))
    return float(variance[0]) / per_update, max(float(square[0]), 0.0)


def _resampled(gram: Matrix, weights: Matrix) -> tuple[Matrix, Matrix]:
    """Variances and squared means of resamples, without what repeated microbatches add or take away."""
    count = len(gram)
    variance, square = _moments(gram, weights)
    stretch = count / (count - 1)
    # squared mean of a resample = unbiased square + variance/K of its own + variance/K of the sample it came from
    return variance * stretch, np.maximum(square + variance / count - 2 * variance * stretch / count, 0.0)


def share(part: Grams, whole: Estimate, per_update: int = 1) -> tuple[float, float, float]:
    """A region's contribution to the whole's damage: bias, noise and data noise."""
    if not whole.denominator > 0.0 or not np.isfinite(part.error).all():
        return math.nan, math.nan, math.nan
    noise, bias = _positive(part.error, per_update)
    data, _ = _positive(part.signal, per_update)
    return bias / whole.averaged, noise / whole.denominator, data / whole.denominator


def quick_estimate(part: Grams, whole: Estimate, per_update: int = 1) -> float:
    """The damage from at least two microbatches, over a whole update known from more microbatches; without an interval."""
    if not np.isfinite(part.error).all():
        return math.inf
    if not whole.denominator > 0.0:
        return 0.0 if not part.error.any() else math.inf
    noise, bias = _positive(part.error, per_update)
    return bias / whole.averaged + noise / whole.denominator


def severity(plain: float, adam: float | None = None) -> float:
    """Damage relative to the line below which a plan passes; it passes below 1.

    The larger of the plain damage and, if it was computed, the damage in units of Adam's steps.
    """
    return max(plain / PASS, 0.0 if adam is None else adam / ADAM_PASS)
