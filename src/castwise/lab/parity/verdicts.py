"""Decide from the damage whether a plan passes, and estimate how many microbatches are needed.

The damage is the squared relative error that a plan adds to an update (:mod:`castwise.lab.parity.damage`). A *line* is a threshold:
plans pass below the lower line and fail above the upper line. bench/bench_verdicts.py validates these pure functions.

A plan passes if the whole interval of its damage is below the lower line, and if enough microbatches were seen. Rounding
may do damage in only a few microbatches, and an interval does not cover what was not drawn. If none of K microbatches
is of a damaging kind, that kind is rarer than 1 - 0.05^(1/K), about 3/K, at 95 % confidence. Assume that every microbatch of this
kind had damage at the upper line. Their share would then have to be below PASS/FAIL, a tenth, to keep the total below the lower
line. So K must be at least 29. Rarer damage, or rarer and worse damage, can be missed.

Source: the "rule of three" (Hanley and Lippman-Hand 1983, JAMA 249(13)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from castwise.lab.parity.damage import ADAM_FAIL, ADAM_PASS, FAIL, LASTING, LEVEL, PASS, Estimate

Verdict = Literal["pass", "fail", "undecided"]

LEAST = math.ceil(math.log(1.0 - LEVEL) / math.log1p(-PASS / FAIL))
"""Minimum number of microbatches on which a plan is tested before it passes: 29."""

_Line = tuple[Estimate, float, float, str]


def _lines(damage: Estimate, adam: Estimate | None) -> list[_Line]:
    out = [(damage, PASS, FAIL, "")]
    if adam is not None:
        out.append((adam, ADAM_PASS, ADAM_FAIL, " in the units of Adam's steps"))
    return out


def may_pass(damage: Estimate, adam: Estimate | None) -> bool:
    """Whether more microbatches may let a plan pass: no interval of its damage lies entirely above the threshold for passing.

    ``damage`` is the plan's error in an update, and ``adam`` the same in units of Adam's steps.
    """
    return all(e.low < below for e, below, _, _ in _lines(damage, adam))


def lasts(damage: Estimate, adam: Estimate | None) -> bool:
    """Whether a plan is fit for long training.

    It is not if its bias certainly exceeds the threshold for passing when the noise of the data has averaged out.
    """
    return all(e.lasting < below for e, below, _, _ in _lines(damage, adam))


def fails(damage: Estimate, adam: Estimate | None) -> bool:
    """Whether a plan fails: the damage or a bias in long training exceeds the threshold for failing.

    The damage counts only if its whole interval is above the threshold for passing.
    """
    return any(
        (e.value > above and e.low > below) or e.lasting > above
        for e, below, above, _ in _lines(damage, adam)
    )


def passes(damage: Estimate, adam: Estimate | None) -> bool:
    """Whether a plan passes: the intervals of its damage are below the thresholds, and it is fit for long training."""
    return all(e.high < below for e, below, _, _ in _lines(damage, adam)) and lasts(damage, adam)


def compare(
    damage: Estimate, adam: Estimate | None, seen: int, least: int = LEAST
) -> tuple[Verdict, str, bool]:
    """Compare a plan's damage with the thresholds for passing and failing.

    Args:
        damage: Damage of the gradients.
        adam: The damage in units of Adam's steps, None if not computed.
        seen: Number of microbatches that the plan ran on.
        least: Minimum number of microbatches on which a plan must be tested to pass.

    Returns:
        The verdict, its reason in a sentence, and whether more microbatches may change it.
    """
    lines = _lines(damage, adam)
    if passes(damage, adam):
        value, below, _ = _worst(lines, [e.high / below for e, below, _, _ in lines])
        if seen < least:
            return (
                "undecided",
                f"{value} is below {below:g} on {seen} microbatches; at least {least} are needed to see damage that only a "
                "few of them have",
                True,
            )
        return (
            "pass",
            f"{value} and its interval are below {below:g}: not distinguishable from the noise of the data",
            False,
        )
    value, below, above = _worst(lines, [e.value / below for e, below, _, _ in lines])
    if any(e.value > above and e.low > below for e, below, above, _ in lines):
        return "fail", f"{value} is above {above:g}", True
    if not lasts(damage, adam):
        _, bias, below, above, units = max(
            (e.lasting / below, e.lasting, below, above, units) for e, below, above, units in lines
        )
        what = (
            f"a bias of at least {bias:.2g} of an update{units} remains when the noise of the data has averaged out over {LASTING} "
            f"microbatches: "
        )
        if bias > above:
            return "fail", f"{what}above {above:g}", True
        return "undecided", f"{what}between {below:g} and {above:g}", True
    if all(e.value < line for e, line, _, _ in lines):
        value, below, _ = _worst(lines, [e.high / line for e, line, _, _ in lines])
        what = (
            f"is below {below:g}, but its interval ends above that after {seen} microbatches; about "
            f"{needed(damage, adam, seen)} would decide"
        )
    elif any(e.value > line for e, _, line, _ in lines):
        what = f"is above {above:g}, and its interval reaches below {below:g} after {seen} microbatches; more microbatches would decide"
    else:
        what = f"lies between {below:g} and {above:g}"
    open_ = may_pass(damage, adam) or any(e.high > line for e, _, line, _ in lines)
    return "undecided", f"{value} {what}", open_


def needed(damage: Estimate, adam: Estimate | None, seen: int) -> int | None:
    """Estimate how many microbatches would let a plan pass of which the damage, but not the interval, is below the thresholds.

    The estimate assumes that rounding noise makes the interval wide, so that it shrinks with the number of microbatches. None is
    returned if the damage is not below the thresholds, if the plan passes already, or if its bias is too large for long training.
    """
    lines = [(e, below) for e, below, _, _ in _lines(damage, adam)]
    if passes(damage, adam) or not lasts(damage, adam) or not all(e.value < below for e, below in lines):
        return None
    return math.ceil(
        round(seen * max(1.0, *((e.high - e.value) / (below - e.value) for e, below in lines)), 6)
    )


def goes_on(verdict: Verdict, may_change: bool, drawn: int, first: int, most: int) -> bool:
    """Whether a test should continue with more microbatches.

    A failure on the first microbatches is confirmed on as many fresh ones.

    Args:
        verdict: The verdict so far.
        may_change: Whether more microbatches may change the verdict.
        drawn: Number of microbatches so far.
        first: Number of microbatches at first, and of those added each time.
        most: Maximum number of microbatches.
    """
    return may_change and drawn < most and (verdict != "fail" or drawn <= first)


def _worst(lines: Sequence[_Line], sizes: Sequence[float]) -> tuple[str, float, float]:
    """Return, in words, that of several damages which belongs to the largest of ``sizes``, and its two thresholds."""
    e, below, above, units = max(zip(sizes, lines, strict=True), key=lambda pair: pair[0])[1]
    value = (
        f"damage {e.value:.2g} (the relative error of an update; {LEVEL:.0%} interval {e.low:.2g} to {e.high:.2g}){units}"
    ).replace("95%", "95 %")
    return value, below, above
