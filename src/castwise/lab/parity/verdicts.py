"""From damage to a verdict, and how many microbatches that takes: pure functions, held to the truth by bench/bench_verdicts.py.

A plan passes where the whole interval of its damage lies below the line, and where enough microbatches were seen: what
rounding does can be in a few of them alone, and an interval knows nothing of what was not drawn. Of K microbatches, none of
which shows it, 95 % certainty remains that a kind of microbatch that they lack is rarer than 1 - 0.05^(1/K), about 3/K. Were
each of that kind as bad as the line above which plans fail, their share would have to be below PASS/FAIL, a tenth, for the
whole to stay below the line where plans pass: so K is 29 at least. Rarer damage, or rarer and worse, can be missed.

Source: the "rule of three" (Hanley and Lippman-Hand 1983, JAMA 249(13)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from castwise.lab.parity.damage import ADAM_FAIL, ADAM_PASS, FAIL, LEVEL, PASS, Estimate

Verdict = Literal["pass", "fail", "undecided"]

LEAST = math.ceil(math.log(1.0 - LEVEL) / math.log1p(-PASS / FAIL))
"""Microbatches that a plan has to have been seen on before it passes: 29."""

_Line = tuple[Estimate, float, float, str]


def _lines(damage: Estimate, adam: Estimate | None) -> list[_Line]:
    out = [(damage, PASS, FAIL, "")]
    if adam is not None:
        out.append((adam, ADAM_PASS, ADAM_FAIL, " in the units of Adam's steps"))
    return out


def may_pass(damage: Estimate, adam: Estimate | None) -> bool:
    """Whether more microbatches may bring the intervals below the lines: no interval lies above them."""
    return all(e.low < below for e, below, _, _ in _lines(damage, adam))


def fails(damage: Estimate, adam: Estimate | None) -> bool:
    """Whether a damage is above the line where plans fail, and its interval above the one where they pass."""
    return any(e.value > above and e.low > below for e, below, above, _ in _lines(damage, adam))


def passes(damage: Estimate, adam: Estimate | None) -> bool:
    """Whether the intervals lie below the lines where plans pass."""
    return all(e.high < below for e, below, _, _ in _lines(damage, adam))


def compare(
    damage: Estimate, adam: Estimate | None, seen: int, least: int = LEAST
) -> tuple[Verdict, str, bool]:
    """Hold a damage against the lines.

    Args:
        damage: Of the gradients.
        adam: The same in the units of Adam's steps, None where it was not asked for.
        seen: Microbatches that the plan was seen on.
        least: How many it takes to pass.

    Returns:
        The verdict, why in a sentence, and whether more microbatches may change it.
    """
    lines = _lines(damage, adam)
    if passes(damage, adam):
        value, below, _ = _worst(lines, [e.high / below for e, below, _, _ in lines])
        if seen < least:
            return (
                "undecided",
                f"{value} is below {below:g} on {seen} microbatches; at least {least} are needed to see damage in a few of "
                f"them",
                True,
            )
        return (
            "pass",
            f"{value} is below {below:g} with its interval: not distinguishable from the noise of the data",
            False,
        )
    value, below, above = _worst(lines, [e.value / below for e, below, _, _ in lines])
    if fails(damage, adam):
        return "fail", f"{value} is above {above:g}", True
    if all(e.value < line for e, line, _, _ in lines):
        value, below, _ = _worst(lines, [e.high / line for e, line, _, _ in lines])
        what = f"is below {below:g}, but its interval ends above it after {seen} microbatches; more of them would decide"
    elif any(e.value > line for e, _, line, _ in lines):
        what = f"is above {above:g}, and its interval reaches below {below:g} after {seen} microbatches; more of them would decide"
    else:
        what = f"lies between {below:g} and {above:g}"
    open_ = may_pass(damage, adam) or any(e.high > line for e, _, line, _ in lines)
    return "undecided", f"{value} {what}", open_


def goes_on(verdict: Verdict, may_change: bool, drawn: int, first: int, most: int) -> bool:
    """Whether more microbatches are to be drawn after so many, of ``first`` at first and ``most`` at most.

    A failure is confirmed on as many fresh ones.
    """
    return may_change and drawn < most and (verdict != "fail" or drawn <= first)


def _worst(lines: Sequence[_Line], sizes: Sequence[float]) -> tuple[str, float, float]:
    """The damage of largest size in words, and its lines."""
    e, below, above, units = max(zip(sizes, lines, strict=True), key=lambda pair: pair[0])[1]
    value = (
        f"damage {e.value:.2g} (the relative error of an update; {LEVEL:.0%} interval {e.low:.2g} to {e.high:.2g}){units}"
    ).replace("95%", "95 %")
    return value, below, above
