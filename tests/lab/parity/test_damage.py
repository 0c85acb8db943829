"""Damage, compared with direct formulas on vectors and with the known values of simulations."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castwise.lab.parity.damage import (
    ADAM_FAIL,
    ADAM_PASS,
    FAIL,
    HORIZON,
    PASS,
    Estimate,
    Grams,
    estimate,
    quick_estimate,
    severity,
    share,
)
from tests.soak import each_value

Vectors = npt.NDArray[np.float64]


def _grams(g: Vectors, d: Vectors) -> Grams:
    return Grams(g @ g.T, d @ d.T)


def _direct(x: Vectors) -> tuple[float, float]:
    """Return the variance and the unbiased square of the mean, computed from the vectors."""
    mean = x.mean(axis=0)
    variance = float(((x - mean) ** 2).sum() / (len(x) - 1))
    return variance, float((mean**2).sum()) - variance / len(x)


def _simulate(
    rng: np.random.Generator,
    *,
    size: int,
    data: float,
    bias: float,
    noise: float,
    signal: float = 1.0,
    count: int = 8,
) -> tuple[Vectors, Vectors]:
    """Draw gradients with squared mean ``signal`` and variance ``data``, and errors with ``bias`` and ``noise``."""
    mean, lean = rng.standard_normal((2, 1, size))
    g = mean * math.sqrt(signal / float((mean**2).sum())) + rng.standard_normal((count, size)) * math.sqrt(
        data / size
    )
    d = lean * math.sqrt(bias / float((lean**2).sum())) + rng.standard_normal((count, size)) * math.sqrt(
        noise / size
    )
    return g, d


@pytest.mark.parametrize("per_update", [1, 4, 64])
def test_estimate_equals_the_formula_on_vectors(per_update: int) -> None:
    rng = np.random.default_rng(0)
    g, d = _simulate(rng, size=50, data=2.0, bias=0.02, noise=0.03)
    variance, square = _direct(g)
    noise, bias = _direct(d)
    below = square + variance / per_update
    found = estimate(_grams(g, d), per_update)
    assert bias > 0
    assert square > 0
    assert found.signal == pytest.approx(square, rel=1e-9)
    assert found.data_noise == pytest.approx(variance / per_update, rel=1e-9)
    assert found.denominator == pytest.approx(below, rel=1e-9)
    averaged = square + variance / max(per_update, HORIZON)
    assert found.averaged == pytest.approx(averaged, rel=1e-9)
    assert found.bias == pytest.approx(bias / averaged, rel=1e-9)
    assert found.noise == pytest.approx(noise / per_update / below, rel=1e-9)
    assert found.value == pytest.approx(found.bias + found.noise, rel=1e-12)
    assert found.low <= found.value <= found.high


def test_averaging_shrinks_noise_and_never_bias() -> None:
    rng = np.random.default_rng(1)
    g, d = _simulate(rng, size=200, data=0.5, bias=0.02, noise=0.5)
    one, many = estimate(_grams(g, d), 1), estimate(_grams(g, d), 100)
    assert one.noise * one.denominator == pytest.approx(100 * many.noise * many.denominator, rel=1e-9)
    assert one.bias * one.averaged == pytest.approx(many.bias * many.averaged, rel=1e-9)
    assert one.signal == pytest.approx(many.signal, rel=1e-12)


def test_a_negative_square_of_bias_or_signal_counts_as_none() -> None:
    # The vectors sum to zero, so the unbiased square of their mean is -variance/K.
    g = np.vstack([np.eye(4), -np.eye(4)])
    found = estimate(_grams(g, 0.1 * g))
    assert found.bias == 0.0
    assert found.signal == 0.0
    assert found.value == pytest.approx(0.01)  # noise only: D/S


@given(
    st.floats(1e-12, 1e12),
    st.integers(2, 12),
    st.integers(0, 2**31),
    st.sampled_from([1, 3, 16]),
)
def test_a_common_factor_changes_nothing(factor: float, count: int, seed: int, per_update: int) -> None:
    rng = np.random.default_rng(seed)
    g, d = rng.standard_normal((2, count, 7)) + 0.5
    plain = estimate(_grams(g, d), per_update)
    scaled = estimate(_grams(factor * g, factor * d), per_update)
    for name in ("value", "low", "high", "bias", "noise"):
        assert getattr(scaled, name) == pytest.approx(getattr(plain, name), rel=1e-6, abs=1e-9), name


@given(st.floats(1e-6, 1e6), st.integers(0, 2**31))
def test_damage_grows_with_the_square_of_the_error(factor: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    g, d = rng.standard_normal((2, 8, 7)) + 0.5
    plain, larger = estimate(_grams(g, d)), estimate(_grams(g, factor * d))
    assert larger.value == pytest.approx(plain.value * factor**2, rel=1e-6)
    assert larger.high == pytest.approx(plain.high * factor**2, rel=1e-6)


@given(st.permutations(range(8)), st.integers(0, 2**31))
def test_the_order_of_microbatches_does_not_matter(order: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    g, d = rng.standard_normal((2, 8, 7)) + 0.5
    assert estimate(_grams(g[order], d[order])).value == pytest.approx(estimate(_grams(g, d)).value, rel=1e-9)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**31))
def test_inner_products_of_parts_add_up_to_those_of_the_whole(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [tuple(rng.standard_normal((2, 5, size))) for size in sizes]
    total = Grams.total(_grams(g, d) for g, d in parts)
    whole = _grams(np.hstack([g for g, _ in parts]), np.hstack([d for _, d in parts]))
    assert total.count == 5
    np.testing.assert_allclose(total.signal, whole.signal, atol=1e-9)
    np.testing.assert_allclose(total.error, whole.error, atol=1e-9)


def test_shares_of_regions_add_up_to_the_noise_of_the_whole_and_name_the_biased_one() -> None:
    rng = np.random.default_rng(2)
    parts = [_simulate(rng, size=60, data=1.0, bias=b, noise=0.01) for b in (1e-12, 0.5, 1e-12)]
    grams = [_grams(g, d) for g, d in parts]
    whole = estimate(Grams.total(grams), 2)
    shares = [share(part, whole, 2) for part in grams]
    assert sum(noise for _, noise, _ in shares) == pytest.approx(whole.noise, rel=1e-9)
    assert sum(data for _, _, data in shares) == pytest.approx(whole.data_noise / whole.denominator, rel=1e-9)
    assert shares[1][0] == pytest.approx(whole.bias, rel=0.05)
    assert max(shares[0][0], shares[2][0]) < 0.01 * shares[1][0]


def test_a_region_without_gradient_has_a_share_of_nothing_and_none_that_explodes() -> None:
    rng = np.random.default_rng(3)
    live = _grams(*_simulate(rng, size=60, data=1.0, bias=1e-9, noise=1e-3))
    dead = _grams(np.zeros((8, 4)), 1e-9 * rng.standard_normal((8, 4)))
    whole = estimate(Grams.total([live, dead]))
    bias, noise, data = share(dead, whole)
    assert bias + noise < 1e-15
    assert data == 0.0


def _whole(denominator: float, averaged: float | None = None) -> Estimate:
    """Return an estimate with only the denominators set."""
    nan = math.nan
    return Estimate(
        nan, nan, nan, nan, nan, nan, nan, denominator, denominator if averaged is None else averaged
    )


def test_a_share_is_over_the_denominators_that_are_given() -> None:
    rng = np.random.default_rng(3)
    part = _grams(*_simulate(rng, size=60, data=1.0, bias=0.5, noise=0.5))
    bias, noise, data = share(part, _whole(1.0))
    assert share(part, _whole(0.25)) == pytest.approx((4 * bias, 4 * noise, 4 * data), rel=1e-12)
    assert share(part, _whole(1.0, 0.5)) == pytest.approx((2 * bias, noise, data), rel=1e-12)
    assert share(part, _whole(1.0)) == share(part, _whole(1.0), 1)
    assert all(math.isnan(one) for one in share(part, _whole(0.0)))


def test_quick_estimate_is_the_estimate_over_a_given_denominator() -> None:
    rng = np.random.default_rng(4)
    g, d = _simulate(rng, size=50, data=2.0, bias=0.2, noise=0.03, count=3)
    full = estimate(_grams(g, d), 4)
    assert quick_estimate(_grams(g, d), full, 4) == pytest.approx(full.value, rel=1e-9)
    twice = _whole(2 * full.denominator, 2 * full.averaged)
    assert quick_estimate(_grams(g, d), twice, 4) == pytest.approx(full.value / 2, rel=1e-9)


# --- non-finite and empty input -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_errors_that_are_not_finite_are_infinite_damage(bad: float) -> None:
    g = np.ones((8, 3)) + np.eye(8, 3)
    error = np.eye(8)
    error[2, 5] = bad
    found = estimate(Grams(g @ g.T, error))
    assert found.value == found.low == found.high == math.inf
    assert quick_estimate(Grams(g @ g.T, error), _whole(1.0)) == math.inf
    assert all(math.isnan(x) for x in share(Grams(g @ g.T, error), _whole(1.0)))


def test_no_gradient_and_no_error_is_no_damage_but_error_on_no_gradient_is_infinite() -> None:
    nothing, something = np.zeros((4, 4)), np.eye(4)
    nil = estimate(Grams(nothing, nothing))
    assert (nil.value, nil.low, nil.high, nil.bias, nil.noise, nil.denominator) == (0.0,) * 6
    assert estimate(Grams(nothing, something)).value == math.inf
    assert quick_estimate(Grams(nothing, nothing), _whole(0.0)) == 0.0
    assert quick_estimate(Grams(nothing, something), _whole(0.0)) == math.inf


def test_one_batch_repeated_has_no_noise_of_data_and_is_judged_by_its_signal() -> None:
    g = np.repeat(np.array([[3.0, 4.0]]), 8, axis=0)
    d = np.repeat(np.array([[0.3, 0.4]]), 8, axis=0)
    found = estimate(_grams(g, d))
    assert found.data_noise == pytest.approx(0.0, abs=1e-12)
    assert found.signal == pytest.approx(25.0)
    assert found.value == pytest.approx(0.01)
    assert (found.low, found.high) == (pytest.approx(0.01), pytest.approx(0.01))


def test_severity_is_one_at_the_line_below_which_plans_pass() -> None:
    assert severity(PASS) == 1.0
    assert severity(PASS, ADAM_PASS) == 1.0
    assert severity(0.0, 2 * ADAM_PASS) == 2.0
    assert severity(3 * PASS, ADAM_PASS) == 3.0


def test_the_lines_are_those_of_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "numerics.md").read_text()
    for verdict, lines in {
        "pass": [PASS, ADAM_PASS],
        "fail": [FAIL, PASS, ADAM_FAIL, ADAM_PASS],
    }.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{verdict}`")]
        assert [float(number) for number in re.findall(r"\d\.\d+", row)] == lines


# --- simulations ----------------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize("size", [100, 2000])
@pytest.mark.parametrize("data", [1.0, 50.0, 200.0])
def test_the_median_is_the_truth_and_the_upper_end_close(size: int, data: float) -> None:
    rng = np.random.default_rng(5)
    bias, noise = 0.02 * (1 + data / HORIZON), 0.02 * (1 + data)
    truth = 0.02 + 0.02
    values = [
        estimate(_grams(*_simulate(rng, size=size, data=data, bias=bias, noise=noise))).value
        for _ in range(100)
    ]
    assert np.median(values) == pytest.approx(truth, rel=0.1)
    spread = 1.35 if data < 200.0 else 2.0  # eight noisy batches say little about the signal
    assert np.quantile(values, 0.95) < spread * truth
    assert np.quantile(values, 0.05) > truth / spread


@each_value()
@pytest.mark.parametrize("bias", [0.0, 0.05])
@pytest.mark.parametrize("data", [1.0, 50.0])
def test_the_interval_covers_the_truth(data: float, bias: float) -> None:
    """The percentile bootstrap of eight draws covers less than its nominal 95 %; 80 % is the least accepted here."""
    rng = np.random.default_rng(6)
    noise = 0.05 * (1 + data)
    truth = bias + 0.05
    covered = 0
    for _ in range(200):
        found = estimate(
            _grams(*_simulate(rng, size=500, data=data, bias=bias * (1 + data / HORIZON), noise=noise))
        )
        covered += found.low <= truth <= found.high
    assert covered / 200 >= 0.8


@pytest.mark.parametrize("data", [50.0, 200.0])
def test_sound_formats_are_not_rejected_where_data_is_noisy_as_a_rule_without_data_noise_does(
    data: float,
) -> None:
    rng = np.random.default_rng(7)
    noise = 1e-3 * (1 + data)  # a tenth of the limit for a pass
    ours, theirs = 0, 0
    for _ in range(200):
        g, d = _simulate(rng, size=100, data=data, bias=0.0, noise=noise)
        found = estimate(_grams(g, d))
        ours += not found.value < PASS
        _, square = _direct(g)
        d_noise, d_bias = _direct(d)
        theirs += not (max(d_bias, 0.0) + d_noise) / max(square, 1e-30) < FAIL
    assert ours == 0
    assert theirs >= 28  # at least 14 %


def test_ruinous_formats_are_not_missed_where_data_is_noisy() -> None:
    rng = np.random.default_rng(8)
    missed = 0
    for _ in range(200):
        g, d = _simulate(rng, size=100, data=50.0, bias=0.4 * 51, noise=0.0)
        found = estimate(_grams(g, d))
        missed += not (found.value > FAIL and found.low > PASS)
    assert missed == 0


def test_the_interval_repeats_and_depends_on_its_seed_alone() -> None:
    rng = np.random.default_rng(9)
    grams = _grams(*_simulate(rng, size=100, data=1.0, bias=0.1, noise=0.1))
    state = np.random.get_state()[1].copy()  # type: ignore[union-attr]
    assert estimate(grams) == estimate(grams)
    assert estimate(grams).high != estimate(grams, seed=1).high
    assert (np.random.get_state()[1] == state).all()  # type: ignore[index]
