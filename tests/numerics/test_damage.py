"""The statistics against a simulation whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from castwise.numerics.damage import PASS, Grams, estimate, quick_estimate, severity, share


def draw(
    rng: np.random.Generator,
    signal: float,
    data: float,
    bias: float,
    noise: float,
    count: int = 8,
    size: int = 200,
) -> Grams:
    """Gradients and errors with given squared means and variances, as inner products."""

    def around(square: float, variance: float) -> np.ndarray:
        mean = rng.normal(size=size)
        mean *= np.sqrt(square) / np.linalg.norm(mean)
        return mean + rng.normal(size=(count, size)) * np.sqrt(variance / size)

    g, d = around(signal, data), around(bias, noise)
    return Grams(g @ g.T, d @ d.T)


@pytest.mark.parametrize("data", [1.0, 50.0, 200.0])
@pytest.mark.parametrize(("bias", "noise"), [(1e-3, 1e-3), (1e-4, 1e-2), (1e-2, 1e-5)])
@pytest.mark.parametrize("per_update", [1, 16])
def test_the_median_is_the_truth(data: float, bias: float, noise: float, per_update: int) -> None:
    rng = np.random.default_rng(0)
    truth = (bias + noise / per_update) / (1.0 + data / per_update)
    values = [estimate(draw(rng, 1.0, data, bias, noise), per_update).value for _ in range(120)]
    assert np.median(values) == pytest.approx(truth, rel=0.15)


def test_the_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(1)
    truth = 2e-3 / 51.0
    found = [estimate(draw(rng, 1.0, 50.0, 1e-3, 1e-3), seed=i) for i in range(150)]
    assert np.mean([e.low <= truth <= e.high for e in found]) > 0.85


@pytest.mark.parametrize("data", [50.0, 200.0])
def test_noisy_data_reject_no_sound_plan_as_the_signal_alone_would(data: float) -> None:
    """At S/G2 of 50 and more, dividing by the signal alone rejects sound plans; the expected square does not."""
    rng = np.random.default_rng(2)
    found = [estimate(draw(rng, 1.0, data, 1e-3, 5e-3)) for _ in range(200)]
    assert sum(e.value > PASS for e in found) == 0
    alone = [(e.bias + e.noise) * e.denominator / max(e.signal, 1e-12) for e in found]
    assert sum(value > PASS for value in alone) > 0.14 * len(found)


def test_it_does_not_depend_on_the_unit_of_the_loss() -> None:
    grams = draw(np.random.default_rng(3), 1.0, 5.0, 1e-3, 1e-2)
    one, other = estimate(grams), estimate(Grams(grams.signal * 1e12, grams.error * 1e12))
    assert one.value == pytest.approx(other.value, rel=1e-9)
    assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=1e-9)


def test_shares_of_regions_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(4)
    parts = [draw(rng, 1.0, 2.0, 1e-2, 1e-2) for _ in range(5)]
    whole = estimate(Grams.total(parts))
    shares = [share(part, whole.denominator) for part in parts]
    assert sum(noise for _, noise, _ in shares) == pytest.approx(whole.noise)
    assert sum(bias for bias, _, _ in shares) == pytest.approx(whole.bias, rel=1e-6)


def test_averaging_shrinks_noise_and_never_bias() -> None:
    grams = draw(np.random.default_rng(5), 1.0, 1e-6, 1e-3, 1e-1)
    one, many = estimate(grams, 1), estimate(grams, 1000)
    assert many.noise == pytest.approx(one.noise / 1000, rel=1e-3)
    assert many.bias == pytest.approx(one.bias, rel=1e-3)


def test_what_is_not_finite_is_infinite_damage() -> None:
    grams = draw(np.random.default_rng(6), 1.0, 1.0, 1e-3, 1e-3)
    grams.error[3, 3] = np.inf
    assert estimate(grams).value == np.inf
    assert quick_estimate(grams, 1.0) == np.inf


def test_no_error_is_no_damage_even_of_nothing() -> None:
    zero = np.zeros((8, 8))
    assert estimate(Grams(zero, zero)).value == 0.0
    assert estimate(Grams(np.eye(8), zero)).value == 0.0


def test_severity_is_the_worse_of_both_units() -> None:
    assert severity(PASS) == 1.0
    assert severity(0.0, 0.06) == pytest.approx(2.0)
