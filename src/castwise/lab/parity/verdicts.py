"""From damage to a verdict, and the number of microbatches needed: pure functions, validated by bench/bench_verdicts.py.

A plan passes if the whole interval of its damage is below the line, and if enough microbatches were seen: rounding
may do damage in only a few of them, and an interval does not cover what was not drawn. If none of K microbatches
is of a damaging kind, that kind is rarer than 1 - 0.05^(1/K), about 3/K, at 95 % confidence. If every
such microbatch were at the line above which plans fail, their share would have to be below PASS/FAIL, a tenth, to keep
the total below the line where plans pass: so K is at least 29. Rarer damage, or rarer and worse, can be missed.

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
    """Whether more microbatches may bring the intervals below the lines: no interval is entirely above its line."""
    return all(e.low < below for e, below, _, _ in _lines(damage, adam))


def lasts(damage: Estimate, adam: Estimate | None) -> bool:
    """Whether a plan is fit for long training: no bias is known to exceed the passing lines there."""
    return all(e.lasting < below for e, below, _, _ in _lines(damage, adam))


def fails(damage: Estimate, adam: Estimate | None) -> bool:
    """Whether damage (with its interval above the passing line) or a lasting bias is above the failing line."""
    return any(
        (e.value > above and e.low > below) or e.lasting > above
        for e, below, above, _ in _lines(damage, adam)
    )


def passes(damage: Estimate, adam: Estimate | None) -> bool:
    """Whether the intervals are below the passing lines, and no bias is known to exceed these lines in a long training."""
    return all(e.high < below for e, below, _, _ in _lines(damage, adam)) and lasts(damage, adam)


def compare(
    damage: Estimate, adam: Estimate | None, seen: int, least: int = LEAST
) -> tuple[Verdict, str, bool]:
    """Compare a damage with the lines.

    Args:
        damage: Damage of the gradients.
        adam: The damage in units of Adam's steps, None if not computed.
        seen: Number of microbatches that the plan ran on.
        least: Minimum number to pass.

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
    """About how many microbatches would let a plan pass if its damage is below the thresholds and its interval is not.

    An interval that rounding noise makes wide shrinks with the number of microbatches. None if the damage is not below.
    """
    lines = [(e, below) for e, below, _, _ in _lines(damage, adam)]
    if passes(damage, adam) or not lasts(damage, adam) or not all(e.value < below for e, below in lines):
        return None
    return math.ceil(
        round(seen * max(1.0, *((e.high - e.value) / (below - e.value) for e, below in lines)), 6)
    )


def goes_on(verdict: Verdict, may_change: bool, drawn: int, first: int, most: int) -> bool:
    """Whether to draw more microbatches after ``drawn``, with ``first`` per extension and ``most`` at most.

    A failure is confirmed on as many fresh microbatches.
    """
    return may_change and drawn < most and (verdict != "fail" or drawn <= first)


def _worst(lines: Sequence[_Line], sizes: Sequence[float]) -> tuple[str, float, float]:
    """The largest damage in words, and its lines."""
    e, below, above, units = max(zip(sizes, lines, strict=True), key=lambda pair: pair[0])[1]
    value = (
        f"damage {e.value:.2g} (the relative error of an update; {LEVEL:.0%} interval {e.low:.2g} to {e.high:.2g}){units}"
    ).replace("95%", "95 %")
    return value, below, above
