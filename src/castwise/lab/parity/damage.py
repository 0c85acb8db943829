"""Compute the damage that rounding does to one optimizer update, from inner products of gradients.

Let g_k be the fp32 gradients of K microbatches, h_k the gradients under a plan at the same weights, data and random draws, and
d_k = h_k - g_k. There are four unbiased estimates:

- S, the variance of g over microbatches: the data's noise;
- G2, the square of the mean of g: the data's signal;
- D, the variance of d over microbatches: the rounding's noise;
- B2, the square of the mean of d: the rounding's bias.

With m microbatches per update, the *damage* is D/m / (max(G2, 0) + S/m) + max(B2, 0) / (max(G2, 0) + S/max(m, HORIZON)). It is
the squared relative error of an update.

The rounding's noise is compared with the expected square of one update, which includes the data's noise, since both noises average
out over later updates. The rounding's bias does not average out. So it is compared with a mean of several microbatches, in which
less of the data's noise is left, as an optimizer's momentum averages them. Otherwise a bias larger than the signal would hide in
the noise of small microbatches.

The damage follows from the K x K matrices of inner products alone. So gradients are computed once, and regions, weightings and
bootstrap samples cost almost nothing. The functions are pure functions of these small matrices.

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
"""Number of microbatches over whose mean a bias is judged: a momentum of 0.9 averages as many updates.

A larger number finds a smaller bias in noisier data. But it leaves more sound plans undecided, since a bias of zero cannot be
measured exactly. Source: bench/results/verdicts-cpu.json, by bench/bench_verdicts.py.
"""
LASTING = 1000
"""Number of microbatches over whose mean a bias is judged for long training: an epoch averages as many or more."""
LEVEL = 0.95
RESAMPLES = 1000


@dataclass(frozen=True)
class Grams:
    """The inner products of gradients, and of the gradients' errors, between K microbatches.

    Attributes:
        signal: ``[K, K]``, <g_k, g_l>, with the fp32 gradients g.
        error: ``[K, K]``, <d_k, d_l>, with d the gradients under a plan minus the fp32 gradients.
    """

    signal: Matrix
    error: Matrix

    @property
    def count(self) -> int:
        """The number of microbatches, K."""
        return len(self.signal)

    @staticmethod
    def total(parts: Iterable[Grams]) -> Grams:
        """Return the sums of several parameters' inner products, which are the inner products of the concatenated gradients."""
        parts = list(parts)
        return Grams(
            np.sum([part.signal for part in parts], axis=0), np.sum([part.error for part in parts], axis=0)
        )


@dataclass(frozen=True)
class Estimate:
    """The damage that a plan does to an optimizer update, with its components and a bootstrap interval.

    The damage is the squared relative error that a plan's rounding adds to one update, compared with fp32. It is
    estimated from the gradients of several microbatches. The letters B2, D, G2, S and m are explained in the
    description of ``castwise.lab.parity.damage``.

    Attributes:
        value: The damage. It is infinite if an error is not finite.
        low: The lower end of the 95 % interval of the damage.
        high: The upper end of the 95 % interval of the damage.
        bias: The part of the damage from the bias of the rounding: max(B2, 0) divided by ``averaged``. A bias is the
            error that all microbatches share.
        noise: The part of the damage from the noise of the rounding: D/m divided by ``denominator``. The noise is the
            error that averages out over microbatches.
        signal: The squared mean gradient, max(G2, 0).
        data_noise: The variance of the gradient of one update over the data, S/m.
        denominator: The expected square of one update, ``signal`` + ``data_noise``.
        averaged: The expected square of the mean of at least ``HORIZON`` (10) microbatches.
        lasting: How large the bias certainly is in long training. It is the lower bound of the bias divided by a sum.
            The sum consists of the lower bound of the signal and the data's noise that is left after ``LASTING``
            (1000) microbatches.
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
    """Return the unbiased variances and squared means of the vectors whose inner products are given.

    There is one of each per row of ``weights``, which says how often each microbatch was drawn.
    """
    count = weights.sum(axis=1)
    square = (weights @ np.diagonal(gram)) / count
    mean = np.einsum("bi,ij,bj->b", weights, gram, weights) / count**2
    variance = np.maximum(square - mean, 0.0) * count / (count - 1)
    return variance, mean - variance / count


def estimate(grams: Grams, per_update: int = 1, whole: Grams | None = None, seed: int = 0) -> Estimate:
    """Estimate the damage, the squared relative error that a plan adds to an update, with an interval.

    The interval is a percentile bootstrap over microbatches. A bootstrap sample repeats microbatches. That makes the sample's
    variances too small by (K - 1)/K on average and its squared means too large; both are corrected.

    Args:
        grams: Inner products of the gradients to judge, of K >= 2 microbatches.
        per_update: Microbatches per update, m.
        whole: Inner products of all gradients, whose expected square is the denominator; by default ``grams`` itself.
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
        """Return the expected square of the mean of so many microbatches, for each bootstrap sample."""
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
    """Return the variance of an update of ``per_update`` microbatches, and the squared mean, which is at least 0."""
    variance, square = _moments(gram, np.ones((1, len(gram))))
    return float(variance[0]) / per_update, max(float(square[0]), 0.0)


def _resampled(gram: Matrix, weights: Matrix) -> tuple[Matrix, Matrix]:
    """Return the variances and squared means of bootstrap samples, corrected for the effect of repeated microbatches."""
    count = len(gram)
    variance, square = _moments(gram, weights)
    stretch = count / (count - 1)
    # squared mean of a bootstrap sample = unbiased square + its own variance/K + variance/K of the original sample
    return variance * stretch, np.maximum(square + variance / count - 2 * variance * stretch / count, 0.0)


def share(part: Grams, whole: Estimate, per_update: int = 1) -> tuple[float, float, float]:
    """Return a region's contributions to the damage, the squared relative error that a plan adds to an update.

    There are three: the bias and the noise of rounding, and in the same unit the noise of the data.
    """
    if not whole.denominator > 0.0 or not np.isfinite(part.error).all():
        return math.nan, math.nan, math.nan
    noise, bias = _positive(part.error, per_update)
    data, _ = _positive(part.signal, per_update)
    return bias / whole.averaged, noise / whole.denominator, data / whole.denominator


def quick_estimate(part: Grams, whole: Estimate, per_update: int = 1) -> float:
    """Return the damage, the squared relative error that a plan adds to an update, from at least two microbatches.

    There is no interval. The expected square of the update, by which the error is divided, comes from ``whole``, which was
    estimated from more microbatches.
    """
    if not np.isfinite(part.error).all():
        return math.inf
    if not whole.denominator > 0.0:
        return 0.0 if not part.error.any() else math.inf
    noise, bias = _positive(part.error, per_update)
    return bias / whole.averaged + noise / whole.denominator


def severity(plain: float, adam: float | None = None) -> float:
    """Return the damage, a plan's error in an update, divided by the threshold below which a plan passes.

    A plan passes if the result is below 1. If the damage in units of Adam's steps was computed, the larger of both quotients is
    returned.
    """
    return max(plain / PASS, 0.0 if adam is None else adam / ADAM_PASS)
