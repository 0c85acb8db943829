"""What rounding does to one update, from inner products of gradients: pure functions of small matrices.

Over K microbatches let g_k be the fp32 gradients, h_k those of a plan at the same weights, data and random draws, and
d_k = h_k - g_k. With the unbiased estimates

- S, the variance of g over batches, and G2, the square of its mean: the data's noise and its signal;
- D, the variance of d, and B2, the square of its mean: the rounding's noise and its bias;

and m microbatches per update, the *damage* is (max(B2, 0) + D/m) / (max(G2, 0) + S/m): the relative error of an
update, as a square over the update's own expected square. Averaging over m shrinks S and D, never B2.

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
        """The sum of inner products: those of the concatenated gradients."""
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
        bias: max(B2, 0) over the denominator.
        noise: D/m over the denominator.
        signal: max(G2, 0), absolute.
        data_noise: S/m, absolute.
        denominator: signal + data_noise.
    """

    value: float
    low: float
    high: float
    bias: float
    noise: float
    signal: float
    data_noise: float
    denominator: float


def _moments(gram: Matrix, weights: Matrix) -> tuple[Matrix, Matrix]:
    """Unbiased variance and squared mean, one per row of ``weights`` (how often each microbatch was drawn)."""
    count = weights.sum(axis=1)
    square = (weights @ np.diagonal(gram)) / count
    mean = np.einsum("bi,ij,bj->b", weights, gram, weights) / count**2
    variance = np.maximum(square - mean, 0.0) * count / (count - 1)
    return variance, mean - variance / count


def _ratio(grams: Grams, weights: Matrix, per_update: int, whole: Grams) -> tuple[Matrix, ...]:
    noise, bias = _moments(grams.error, weights)
    data, signal = _moments(whole.signal, weights)
    bias, signal = np.maximum(bias, 0.0), np.maximum(signal, 0.0)
    return bias, noise / per_update, signal, data / per_update


def estimate(grams: Grams, per_update: int = 1, whole: Grams | None = None, seed: int = 0) -> Estimate:
    """The damage, with a percentile bootstrap over microbatches as its interval.

    A resample repeats microbatches, which makes its variances too small by (K - 1)/K on average and its squared means
    too large; both are corrected.

    Args:
        grams: Of the gradients to judge, K >= 2.
        per_update: Microbatches per update, m.
        whole: Of all gradients, whose update is the denominator; by default ``grams`` itself.
        seed: Of the bootstrap.
    """
    whole = grams if whole is None else whole
    count = grams.count
    if not np.isfinite(grams.error).all():
        variance, square = _moments(whole.signal, np.ones((1, count)))
        nan, inf = float("nan"), float("inf")
        return Estimate(inf, inf, inf, nan, nan, float(square[0]), float(variance[0]), nan)
    bias, noise, signal, data = (float(x[0]) for x in _ratio(grams, np.ones((1, count)), per_update, whole))
    below = signal + data
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1.0 / count), size=RESAMPLES)
    weights = draws[(draws > 0).sum(axis=1) > 1].astype(np.float64)
    stretch = count / (count - 1)
    b_noise, b_raw = _moments(grams.error, weights)
    b_data, b_signal = _moments(whole.signal, weights)
    # squared mean of a resample = unbiased square + variance/K of its own + variance/K of the sample it came from
    b_bias = np.maximum(b_raw + b_noise / count - 2 * b_noise * stretch / count, 0.0)
    b_signal = np.maximum(b_signal + b_data / count - 2 * b_data * stretch / count, 0.0)
    under = b_signal + b_data * stretch / per_update
    ratios = (b_bias + b_noise * stretch / per_update) / np.maximum(under, np.finfo(np.float64).tiny)
    tail = (1.0 - LEVEL) / 2.0
    low, high = (float(x) for x in np.quantile(ratios, (tail, 1.0 - tail)))
    if below <= 0.0:
        value = 0.0 if bias + noise == 0.0 else math.inf
        return Estimate(value, value, value, 0.0, 0.0, signal, data, below)
    value = (bias + noise) / below
    return Estimate(
        value, min(low, value), max(high, value), bias / below, noise / below, signal, data, below
    )


def share(part: Grams, denominator: float, per_update: int = 1) -> tuple[float, float, float]:
    """A region's contribution to the whole's damage: bias, noise and data noise over the whole's denominator."""
    if denominator <= 0.0 or not np.isfinite(part.error).all():
        return math.nan, math.nan, math.nan
    bias, noise, _, data = (float(x[0]) for x in _ratio(part, np.ones((1, part.count)), per_update, part))
    return bias / denominator, noise / denominator, data / denominator


def quick_estimate(part: Grams, denominator: float, per_update: int = 1) -> float:
    """The damage from at least two microbatches, over a denominator from more microbatches; without an interval."""
    if not np.isfinite(part.error).all():
        return math.inf
    if denominator <= 0.0:
        return 0.0 if not part.error.any() else math.inf
    noise, bias = _moments(part.error, np.ones((1, part.count)))
    return float(max(bias[0], 0.0) + noise[0] / per_update) / denominator


def severity(plain: float, adam: float | None = None) -> float:
    """Damage relative to the line below which a plan passes; it passes below 1.

    The larger of the plain damage and, if it was computed, the damage in units of Adam's steps.
    """
    return max(plain / PASS, 0.0 if adam is None else adam / ADAM_PASS)
