"""Choose one of several plans by their measured times.

:func:`decide` takes the simplest plan that is known to take at most 3 % longer than every other. It rejects a simpler plan only
if that plan is known to be slower than another. Either these times show that, or an earlier race does and these times do not
contradict it. While a simpler plan is neither acceptable nor rejected, :func:`settle` starts and times all plans again. If the
time runs out, the simpler plan is taken, and the decision says that the machine was too noisy. After two starts much clearer
evidence is required than later. On a quiet machine a third start would add nothing, but on a noisy machine a third of the
searches would end there by chance.

A start runs each plan in a new process of its own, and the processes take turns (:mod:`castwise.lab.timing.apart`). The
difference between two plans is computed per start (:func:`castwise.lab.timing.stats.restarts`), because the drift of the
machine then affects both. A process that is fast or slow by chance for its whole life counts as one sample.
``bench/bench_decision.py`` simulates how often the rule errs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from castwise.lab.timing import stats

MARGIN = 1.03
"""The chosen plan may take this many times as long as the best plan: a smaller gain does not justify a more complicated
plan."""
BEHIND = 1.05
"""The race shows that a plan is slower only if it takes at least this many times as long as the other plan. A race in one
process is off by up to 4 % (bench/results/race-cpu.json)."""
SLOWER = 1.0075
"""A simpler plan is rejected if it is known to take at least this many times as long as another. An equally fast plan rarely
measures that slow."""
LIKELY, SURE, EARLY = 0.975, 0.97, 0.99
"""Two-sided confidence. ``LIKELY`` is for the claim that the chosen plan is within the margin, ``SURE`` for the claim that a
simpler plan is slower, and ``EARLY`` for both claims after the fewest starts. Both are tested after every start; the resulting
error rate is simulated."""
STRICT = 0.997
"""Confidence for the claim of ``LIKELY`` if plans do not vary alike: each plan is then known from its own starts alone."""
ROUNDS = 8
"""Rounds of each start. Fewer rounds need more starts, and each start builds all models again. On a quiet machine more rounds
only take longer."""
LEAST, MOST = 2, 16
"""The smallest and the largest number of starts. A single start does not show how much starts differ."""


@dataclass(frozen=True)
class Decision:
    """The plan to take, and how certain the choice is.

    Attributes:
        chosen: Index of the plan to take.
        decided: Whether the chosen plan is known to be within 3 % of the best, and every simpler plan is known to be slower.
        out: Indices of plans known to be more than 3 % slower than another.
    """

    chosen: int
    decided: bool
    out: frozenset[int] = frozenset()


One = TypeVar("One")


def among(pairs: Collection[tuple[One, One]], left: Sequence[One]) -> frozenset[tuple[int, int]]:
    """Return the pairs whose members are both in ``left``, with each member replaced by its index in ``left``."""
    return frozenset((left.index(one), left.index(two)) for one, two in pairs if {one, two}.issubset(left))


def decide(
    complexity: Sequence[float],
    times_s: Sequence[Sequence[Sequence[float]]],
    behind: Collection[tuple[int, int]] = (),
    levels: tuple[float, float] = (LIKELY, SURE),
) -> Decision:
    """Choose among plans by their times.

    Args:
        complexity: One value per plan, for at least one plan. Among equal values the earlier plan counts as simpler.
        times_s: For each plan, seconds per step by start and round, as :func:`castwise.lab.timing.stats.restarts` takes them.
        behind: Pairs (slower, faster) known from a race (``BEHIND``). A pair counts only if the ratio estimated from
            ``times_s`` is also beyond the margin. A pair alone never makes the choice decided.
        levels: Confidence that the chosen plan is within the margin, and confidence that others are slower.
    """
    order = sorted(range(len(complexity)), key=lambda index: (complexity[index], index))
    likely = stats.restarts(times_s, levels[0], strict=STRICT)
    sure = stats.restarts(
        times_s, levels[1]
    )  # not strict with few starts: if time runs out, the choice uses all available evidence
    strict = stats.restarts(times_s, levels[1], strict=levels[1])
    lead = {one: max((sure[one, two].low for two in order if two != one), default=0.0) for one in order}
    out = frozenset(one for one, two in strict if strict[one, two].low > MARGIN)
    could = [one for one in order if lead[one] <= SLOWER] or [min(order, key=lead.__getitem__)]
    raced = {one for one, two in behind if sure[one, two].value > MARGIN}
    for one in order:  # a plan that is no faster than a rejected simpler plan is rejected too
        if any(two in raced and sure[one, two].value >= 1.0 for two in order[: order.index(one)]):
            raced.add(one)
    simplest = next((one for one in could if one not in raced), could[0])
    for one in order[: order.index(simplest) + 1]:
        if all(likely[one, two].high < MARGIN for two in order if two != one):
            return Decision(one, order.index(one) <= order.index(could[0]), out)
    return Decision(simplest, False, out)


def settle(
    complexity: Sequence[float],
    start: Callable[[Sequence[int]], Mapping[int, Sequence[float]]],
    beside: frozenset[int] = frozenset(),
    is_over: Callable[[], bool] = lambda: False,
    reference: frozenset[int] = frozenset(),
    without: frozenset[int] = frozenset(),
    times: Sequence[Sequence[Sequence[float]]] = (),
    behind: Collection[tuple[int, int]] = (),
) -> tuple[Decision, list[list[Sequence[float]]]]:
    """Start plans repeatedly until their times decide which to choose.

    Args:
        complexity: Complexity of each plan.
        start: Starts the plans with the given indices in new processes and times them in turns. It returns the seconds per step
            of each plan, by round. A plan that is missing from the result has failed and takes no further part.
        beside: Indices of plans that are timed for display only. They can be chosen only if all others fail.
        is_over: Returns whether the time is too short for another start.
        reference: Indices of plans that are started to the end even if they are known to be slower, because speeds are given
            relative to them: the machine drifts, and two plans are comparable only over the same starts.
        without: Indices of plans that take no part from the beginning.
        times: Times of earlier starts, in the returned form.
        behind: As for :func:`decide`.

    Returns:
        The decision, and for each plan its times by start; the times are empty for starts without that plan.
    """
    taken = [list(starts) for starts in times] or [[] for _ in complexity]
    racing = [one for one in range(len(complexity)) if one not in without]
    gone: frozenset[int] = frozenset()
    while True:
        starts = max(map(len, taken))
        if starts:
            could = [one for one in racing if one not in beside] or racing
            left = [one for one in could if one not in gone] or could
            times_s, known = [taken[one] for one in left], among(behind, left)
            weights = [complexity[one] for one in left]
            decision = decide(weights, times_s, known)
            decided = decision.decided and starts >= LEAST
            if decided and starts == LEAST:
                early = decide(weights, times_s, known, (EARLY, EARLY))
                decided = early.decided and early.chosen == decision.chosen
            out = gone.union(left[one] for one in decision.out)
            if decided or starts >= MOST or is_over():
                return Decision(left[decision.chosen], decided, out), taken
            if starts > 1:  # the spread of plans that are known to be slower says nothing about the others
                gone = out
                racing = [one for one in racing if one not in gone or one in reference]
        found = start(racing)
        racing = [one for one in racing if one in found]
        for one in racing:
            taken[one] += [()] * (starts - len(taken[one]))
            taken[one].append(found[one])
