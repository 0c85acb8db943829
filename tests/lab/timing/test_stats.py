"""Statistics of times, on known distributions and on planted faults."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castwise.lab.timing.stats import paired_speedup, quantile, summarise

times = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40)


@given(times, st.floats(0, 1))
def test_quantile_is_numpys(values: list[float], q: float) -> None:
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-12)


def test_summary_of_known_numbers_and_against_an_outlier() -> None:
    summary = summarise([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (summary.median_s, summary.q1_s, summary.q3_s, summary.n) == (3.0, 2.0, 4.0, 5)
    assert summarise([4.0, 1.0, 2.0, 3.0, 5000.0]) == summary


def _machine(n: int, seed: int, baseline_s: float, candidate_s: float) -> tuple[list[float], list[float]]:
    """Draw times on a machine whose speed drifts threefold, with a long right tail."""
    draw = random.Random(seed)
    drift = [1.0 + 2.0 * index / n for index in range(n)]
    return (
        [baseline_s * d * (1.0 + draw.expovariate(20)) for d in drift],
        [candidate_s * d * (1.0 + draw.expovariate(20)) for d in drift],
    )


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8, 12, 20])
def test_interval_covers_the_truth_as_often_as_it_says(n: int) -> None:
    runs = 200
    hits = 0
    for seed in range(runs):
        ratio = paired_speedup(*_machine(n, seed, 2.0, 1.0), resamples=200)
        hits += ratio.low <= 2.0 <= ratio.high
    # With 200 intervals at 95 %, fewer than 184 hits have a probability of about 2 %.
    assert hits >= 184


def test_pairs_see_through_a_drift_that_hides_the_difference_from_unpaired_times() -> None:
    baseline, candidate = _machine(12, 3, 1.1, 1.0)
    ratio = paired_speedup(baseline, candidate)
    assert ratio.low > 1.0
    # the fault: without pairs the ratios contain the drift
    shuffled = random.Random(0).sample(candidate, len(candidate))
    assert paired_speedup(baseline, shuffled).is_tie


def test_equal_candidates_are_a_tie_nearly_always() -> None:
    wrong = sum(
        not paired_speedup(*_machine(12, seed, 1.0, 1.0), resamples=200).is_tie for seed in range(100)
    )
    assert wrong <= 10


def test_a_clear_difference_is_no_tie_and_the_right_way_round() -> None:
    ratio = paired_speedup(*_machine(12, 1, 3.0, 1.0))
    assert ratio.low > 2.5
    assert paired_speedup(*reversed(_machine(12, 1, 3.0, 1.0))).high < 0.4


def test_same_times_and_seed_give_the_same_interval() -> None:
    baseline, candidate = _machine(9, 5, 1.0, 1.0)
    assert paired_speedup(baseline, candidate, seed=1) == paired_speedup(baseline, candidate, seed=1)


@given(times)
def test_estimate_is_the_median_ratio_and_lies_inside(values: list[float]) -> None:
    other = [1.0 + v for v in values]
    ratio = paired_speedup(values, other, resamples=50)
    assert ratio.value == statistics.median(a / b for a, b in zip(values, other, strict=True))
    assert ratio.low <= ratio.value <= ratio.high


def test_few_pairs_have_a_wider_interval_and_no_lower_level() -> None:
    ratio = paired_speedup([2.0, 2.2, 2.4], [1.0, 1.0, 1.0])
    logs = np.log([2.0, 2.2, 2.4])
    half = 4.303 * logs.std(ddof=1) / 3**0.5
    assert (ratio.value, ratio.level) == (2.2, 0.95)
    assert (ratio.low, ratio.high) == pytest.approx((np.exp(logs.mean() - half), np.exp(logs.mean() + half)))
    assert all(paired_speedup([1.5] * n, [1.0] * n).level == 0.95 for n in range(1, 9))


def test_one_pair_says_nothing() -> None:
    ratio = paired_speedup([2.0], [1.0])
    assert (ratio.value, ratio.low, ratio.high, ratio.is_tie) == (2.0, 0.0, float("inf"), True)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_few_pairs_of_equals_have_a_direction_as_rarely_as_many(n: int) -> None:
    wrong = sum(not paired_speedup(*_machine(n, seed, 1.0, 1.0)).is_tie for seed in range(200))
    assert wrong <= 16  # at an error rate of 5 %, more have a probability of about 2 %


@pytest.mark.parametrize(
    ("baseline", "candidate", "message"),
    [
        ([], [], "0 baseline and 0 candidate times"),
        ([1.0], [1.0, 2.0], "1 baseline and 2 candidate times"),
        ([1.0], [0.0], "positive finite number"),
        ([float("nan")], [1.0], "positive finite number"),
    ],
)
def test_refuses_times_that_are_no_pairs(baseline: list[float], candidate: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_speedup(baseline, candidate)


def test_quantile_refuses_nothing() -> None:
    with pytest.raises(ValueError, match="length 0"):
        quantile([], 0.5)
