"""The rule decides as documented, and errs as rarely as its intervals say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from castwise.lab.serve.outputs import Difference
from castwise.lab.serve.verdicts import CONDITION, LINE, SLACK, OutputError, decide
from castwise.lab.timing.stats import ratio_of_sums

EPS = 2.0**-7


def values(errors: list[float], floors: list[float], line: float = LINE, size: float = 1.0) -> OutputError:
    """Decide about one output of which each batch has 100 elements of the given size."""
    fp32 = [size * torch.tensor([1.0, -1.0]).repeat(50) for _ in errors]
    made = [[Difference(100, e**2, 100.0 * size**2) for e in found] for found in (errors, floors)]
    return decide("output", "values", fp32, made[0], made[1], line, EPS)


def test_verdicts() -> None:
    floor = [1e-3] * 8
    assert values([3e-3] * 8, floor).verdict == "pass"
    assert values([5e-3] * 8, floor).verdict == "fail"
    mixed = values([1e-3, 8e-3] * 4, floor)
    assert mixed.verdict == "undecided"
    assert mixed.low < LINE < mixed.high
    assert values([3e-3] * 8, floor, line=2.0).verdict == "fail"


def test_needed_batches_decide() -> None:
    draw = np.random.default_rng(0)
    found = values(list(draw.lognormal(math.log(2e-3), 0.8, 8)), [1e-3] * 8)
    assert found.verdict == "undecided"
    count = found.needed(8, LINE)
    assert count is not None
    assert values(list(draw.lognormal(math.log(2e-3), 0.8, 2 * count)), [1e-3] * 2 * count).verdict == "pass"


def test_rare_and_large_errors_fail() -> None:
    errors = [1e-3] * 30 + [1.0, 1.0]
    assert values(errors, [1e-3] * 32).verdict == "fail"
    once = values([1e-3] * 31 + [1.0], [1e-3] * 32)
    assert once.verdict == "undecided"


def test_the_floor_excuses_only_what_the_format_can_serve() -> None:
    most = CONDITION * EPS * 10.0  # of the norm of 100 elements of size 1
    assert values([most] * 8, [most] * 8).verdict == "pass"
    found = values([5 * most] * 8, [5 * most] * 8)
    assert (found.verdict, found.coarse) == ("fail", True)
    assert "too coarse" in found.said(LINE)


def test_without_a_floor_an_output_may_be_rounded_to_the_format_and_no_more() -> None:
    assert values([0.0] * 4, [0.0] * 4).verdict == "pass"
    assert values([EPS * 10.0 / 4.0] * 4, [0.0] * 4).verdict == "pass"
    assert values([EPS * 10.0 * 2.0] * 4, [0.0] * 4).verdict == "fail"


def test_non_finite_outputs_fail_whatever_the_rest() -> None:
    fp32 = [torch.tensor([1.0, -1.0])] * 4
    plan = [Difference(2, 0.0, 2.0, nonfinite=int(at == 3)) for at in range(4)]
    found = decide("output", "values", fp32, plan, [Difference(2, 1.0, 2.0)] * 4, LINE, EPS)
    assert (found.verdict, found.by, found.nonfinite, found.error) == ("fail", "finite", 1, math.inf)
    assert found.said(LINE) == "output has 1 values that are NaN, or infinite where fp32's are finite"


@pytest.mark.parametrize(("changed", "verdict"), [(0, "pass"), (2, "pass"), (30, "fail")])
def test_integers_are_held_against_those_that_rounding_changes(changed: int, verdict: str) -> None:
    fp32 = [torch.zeros(1000, dtype=torch.int64)] * 8
    plan = [Difference(1000, decisions=1000, changed=changed)] * 8
    floor = [Difference(1000, decisions=1000, changed=0)] * 8
    assert decide("tokens", "integers", fp32, plan, floor, LINE, EPS).verdict == verdict
    excused = [Difference(1000, decisions=1000, changed=20)] * 8
    assert decide("tokens", "integers", fp32, plan, excused, LINE, EPS).verdict == "pass"


def test_decisions_with_a_clear_margin() -> None:
    fp32 = [torch.tensor([[1.0, -1.0]]).repeat(200, 1)] * 8
    floor = [Difference(400, 1e-4, 400.0, decisions=200)] * 8

    def verdict(changed: int, unexplained: int) -> OutputError:
        plan = [Difference(400, 1e-4, 400.0, decisions=200, changed=changed, unexplained=unexplained)] * 8
        return decide("logits", "logits", fp32, plan, floor, LINE, EPS)

    assert verdict(50, 0).verdict == "pass"  # ties
    failed = verdict(5, 5)
    assert (failed.verdict, failed.by) == ("fail", "decisions")
    assert failed.times == pytest.approx(5 / 200 / SLACK * LINE)


def test_the_interval_covers() -> None:
    """The ratio of means of two gamma variables lies within the 95 % interval in about 95 % of samples."""
    draw = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        above, below = draw.gamma(4.0, 1.0, 16) * 2.0, draw.gamma(4.0, 1.0, 16)
        ratio = ratio_of_sums(list(above), list(below))
        hits += ratio.low <= 2.0 <= ratio.high
    assert 0.91 < hits / 400 < 0.985


def test_ratios_of_sums_at_their_edges() -> None:
    assert ratio_of_sums([0.0, 0.0], [0.0, 0.0]).value == 0.0
    assert ratio_of_sums([1.0, 0.0], [0.0, 0.0]).value == math.inf
    assert ratio_of_sums([math.inf, 1.0], [1.0, 1.0]).low == math.inf
    one = ratio_of_sums([2.0], [1.0])
    assert (one.value, one.low, one.high) == (2.0, 0.0, math.inf)
    with pytest.raises(ValueError, match="as many of each"):
        ratio_of_sums([1.0], [])
