"""The rule for verdicts: the interval must be below the limit, on enough microbatches to see rare damage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from castwise.lab.parity.damage import ADAM_FAIL, ADAM_PASS, FAIL, PASS, Estimate, Grams, estimate
from castwise.lab.parity.verdicts import LEAST, compare, goes_on, may_pass, needed


def _damage(value: float, low: float, high: float, lasting: float = 0.0) -> Estimate:
    return Estimate(value, low, high, value, 0.0, 1.0, 1.0, 2.0, 1.0, lasting)


LOW = _damage(PASS / 10, PASS / 20, PASS / 5)


def test_the_least_number_is_the_first_that_leaves_no_room_for_a_tenth_of_the_microbatches() -> None:
    assert LEAST == 29
    assert (1 - PASS / FAIL) ** LEAST <= 0.05 < (1 - PASS / FAIL) ** (LEAST - 1)


def test_an_interval_below_the_line_passes_on_microbatches_enough_and_waits_for_more_on_fewer() -> None:
    assert compare(LOW, None, LEAST)[0] == "pass"
    verdict, reason, more = compare(LOW, None, LEAST - 1)
    assert (verdict, more) == ("undecided", True)
    assert reason.endswith(
        "is below 0.01 on 28 microbatches; at least 29 are needed to see damage that only a few of them have"
    )
    assert compare(LOW, None, 3, least=3)[0] == "pass"


@pytest.mark.parametrize("adam", [False, True])
def test_an_interval_that_reaches_over_the_line_is_undecided_and_more_would_decide(adam: bool) -> None:
    line = ADAM_PASS if adam else PASS
    reaching = _damage(0.8 * line, 0.5 * line, 1.3 * line)
    verdict, reason, more = compare(LOW, reaching, 32) if adam else compare(reaching, LOW, 32)
    assert (verdict, more) == ("undecided", True)
    assert (
        f"is below {line:g}, but its interval ends above that after 32 microbatches; about 80 would decide"
        in reason
    )
    assert ("in the units of Adam's steps" in reason) == adam


def test_between_the_lines_more_is_drawn_only_where_it_can_decide() -> None:
    firm = _damage(0.04, 0.02, 0.08)
    assert compare(firm, None, 32)[0::2] == ("undecided", False)
    assert "lies between 0.01 and 0.1" in compare(firm, None, 32)[1]
    assert compare(_damage(0.04, 0.02, 0.12), None, 32)[0::2] == ("undecided", True)
    assert compare(_damage(0.04, 0.005, 0.08), None, 32)[0::2] == ("undecided", True)
    verdict, reason, more = compare(_damage(0.2, 0.005, 0.5), None, 32)
    assert (verdict, more) == ("undecided", True)
    assert "is above 0.1, and its interval reaches below 0.01" in reason


@pytest.mark.parametrize("adam", [False, True])
def test_a_known_bias_that_outlasts_the_noise_of_the_data_does_not_pass(adam: bool) -> None:
    line, fail = (ADAM_PASS, ADAM_FAIL) if adam else (PASS, FAIL)
    for lasting, expected in ((0.9 * line, "pass"), (1.1 * line, "undecided"), (1.1 * fail, "fail")):
        found = _damage(line / 10, line / 20, line / 5, lasting)
        verdict, reason, _ = compare(LOW, found, 32) if adam else compare(found, LOW, 32)
        assert verdict == expected
        assert ("has averaged out" in reason) == (expected != "pass")


def test_the_number_that_would_decide_grows_with_the_interval() -> None:
    near, wide = (_damage(0.5 * PASS, 0.1 * PASS, high * PASS) for high in (1.5, 3.0))
    assert needed(near, None, 32) == 64
    assert needed(wide, LOW, 32) == 160
    assert needed(LOW, wide, 32) is None or needed(LOW, wide, 32) < 160
    assert needed(LOW, None, 32) is None
    assert needed(_damage(2 * PASS, PASS / 2, 3 * PASS), None, 32) is None
    assert needed(_damage(0.5 * PASS, 0.1 * PASS, 1.5 * PASS, 2 * PASS), None, 32) is None


@pytest.mark.parametrize("seed", range(6))
def test_the_number_that_would_decide_decides_where_few_dimensions_make_the_interval_wide(seed: int) -> None:
    """The format is sound, with 20 effective dimensions, very noisy data and 16 microbatches per update."""
    rng = np.random.default_rng(seed)
    signal, error = rng.standard_normal((2, 600, 20)) / math.sqrt(20)
    signal[:, 0] += 0.1
    error *= 0.003**0.5

    def found(count: int) -> Estimate:
        return estimate(Grams(signal[:count] @ signal[:count].T, error[:count] @ error[:count].T), 16)

    count = needed(found(32), None, 32) or 32
    assert count <= 600
    assert compare(found(2 * count), None, 2 * count)[0] == "pass"


def _biased(size: int, data: float, bias: float) -> str:
    """Return the verdict for a ``bias`` and a data noise ``data``, both in units of the squared signal."""
    rng = np.random.default_rng(size)
    signal, error = rng.standard_normal((2, 32, size)) / math.sqrt(size)
    signal[:, 0] += data**-0.5
    error *= 0.001**0.5
    error[:, 1] += (bias / data) ** 0.5
    return compare(estimate(Grams(signal @ signal.T, error @ error.T)), None, 32)[0]


@pytest.mark.parametrize("size", [20, 100, 1000])
@pytest.mark.parametrize("data", [1.0, 50.0, 1000.0])
def test_a_bias_does_not_hide_in_the_noise_of_the_data(size: int, data: float) -> None:
    assert _biased(size, data, 3.0) != "pass"
    assert _biased(size, data, 0.5) != "pass"
    assert _biased(size, data, 0.0) == "pass"


def test_a_failure_needs_its_interval_above_the_line_of_a_pass() -> None:
    assert compare(_damage(0.2, 0.05, 0.5), None, 8)[0] == "fail"
    assert compare(_damage(math.inf, math.inf, math.inf), LOW, 1)[0] == "fail"
    assert not may_pass(_damage(0.2, 0.05, 0.5), None)
    assert may_pass(LOW, LOW)


def test_a_failure_is_confirmed_once_and_nothing_is_drawn_beyond_the_most() -> None:
    assert goes_on("fail", True, 8, 8, 32)
    assert not goes_on("fail", True, 16, 8, 32)
    assert not goes_on("fail", False, 8, 8, 32)  # damage that is not finite needs no confirmation
    assert not goes_on("pass", False, 8, 8, 32)
    assert goes_on("undecided", True, 24, 8, 32)
    assert not goes_on("undecided", True, 32, 8, 32)
    assert not goes_on("undecided", False, 8, 8, 32)


def _verdict(rng: np.random.Generator, every: int, times: float, least: int) -> str:
    """Return parity's verdict on damage ``times`` the limit, concentrated in one of ``every`` microbatches."""
    signal = rng.standard_normal((32, 40)) / math.sqrt(40)
    signal[:, 0] += 1.0
    error = rng.standard_normal((32, 40))
    error /= np.linalg.norm(error, axis=1, keepdims=True)
    hit = rng.random(32) < 1.0 / every
    error *= np.sqrt(2.0 * times * PASS * every * hit)[:, None]
    count = 8
    while True:
        part = Grams((signal @ signal.T)[:count, :count], (error @ error.T)[:count, :count])
        verdict, _, more = compare(estimate(part), None, count, least)
        if not goes_on(verdict, more, count, 8, 32):
            return verdict
        count += 8


@pytest.mark.parametrize("every", [2, 10])
def test_damage_three_times_the_line_is_missed_in_a_twentieth_of_trials_at_most(every: int) -> None:
    rng = np.random.default_rng(0)
    missed = sum(_verdict(rng, every, 3.0, LEAST) == "pass" for _ in range(100))
    assert missed <= 0.05 * 100


def test_without_a_least_number_damage_in_a_tenth_of_the_microbatches_is_missed() -> None:
    rng = np.random.default_rng(0)
    missed = sum(_verdict(rng, 10, 3.0, 0) == "pass" for _ in range(60))
    assert missed >= 0.2 * 60


def test_even_damage_a_third_of_the_line_passes() -> None:
    rng = np.random.default_rng(0)
    assert all(_verdict(rng, 1, 0.3, LEAST) == "pass" for _ in range(40))
