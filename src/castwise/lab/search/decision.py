"""Which of several plans to take, by the times that they were raced with: pure functions, and the loop around them.

The plan taken is the simplest that is known to be within 3 % of every other. A simpler one is rejected only when it is
known to be slower than another: by these times, or by a race before them that these do not contradict. As long as a simpler
plan is neither, all are started and timed again; where the time for that is over it is taken, and the decision says that the
machine was too noisy to know. Two starts decide only what is far clearer than it has to be later: on a quiet machine a third
would tell nothing new, and on a busy one luck would end a third of the searches there.

Times come from plans that were all started anew several times, in processes of their own, and ran in turns
(:mod:`castwise.lab.timing.apart`). What two plans differ by is taken per start (:func:`castwise.lab.timing.stats.restarts`): the
drift of the machine falls on both, and a process that is lucky for its whole life is one draw of as many as there are
starts. ``bench/bench_decision.py`` simulates how often the rule is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from castwise.lab.timing import stats

MARGIN = 1.03
"""A plan may take this many times as long as the best: a smaller gain is not worth a more complicated plan."""
BEHIND = 1.05
"""What takes more than this many times as long as another in the race, at the least, is behind it: a race in one process is off by
up to 4 % (bench/results/race-cpu.json)."""
SLOWER = 1.0075
"""A simpler plan is rejected if it is known to take at least this many times as long: an equally fast plan rarely measures
so badly."""
LIKELY, SURE, EARLY = 0.95, 0.97, 0.99
"""Confidence, two-sided, with which the plan taken is within the margin, with which a simpler one is slower, and of both where
the fewest starts decide. Several are looked at, after every start: how often one of the two is wrong is simulated."""
ROUNDS = 6
"""Rounds of each start. With fewer, more starts are needed, each of which builds all models again; on a quiet machine more
only take longer."""
LEAST, MOST = 2, 16
"""The least and the most starts; one start alone does not show how much another would differ."""


@dataclass(frozen=True)
class Decision:
    """What the times say.

    Attributes:
        chosen: Index of the plan to take.
        decided: Whether it is known to be within 3 % of the best, and every simpler one to be slower.
        out: Plans that are known to be more than 3 % slower than another.
    """

    chosen: int
    decided: bool
    out: frozenset[int] = frozenset()


One = TypeVar("One")


def among(pairs: Collection[tuple[One, One]], left: Sequence[One]) -> frozenset[tuple[int, int]]:
    """Pairs of which both are left, by their places there."""
    return frozenset((left.index(one), left.index(two)) for one, two in pairs if {one, two}.issubset(left))


def decide(
    complexity: Sequence[float],
    times_s: Sequence[Sequence[Sequence[float]]],
    behind: Collection[tuple[int, int]] = (),
    levels: tuple[float, float] = (LIKELY, SURE),
) -> Decision:
    """Choose among plans.

    Args:
        complexity: Of each plan, at least one; of equals the earlier counts as the simpler.
        times_s: Of each, per start and per round seconds per step, as :func:`castwise.lab.timing.stats.restarts` takes them.
        behind: The one and the other where a race knew the one to be slower (``BEHIND``). It is believed where the estimate of
            these times is beyond the margin too, and decides nothing: that takes these times.
        levels: Confidence with which the plan taken is within the margin, and with which others are slower.
    """
    order = sorted(range(len(complexity)), key=lambda index: (complexity[index], index))
    likely, sure = (stats.restarts(times_s, level) for level in levels)
    lead = {one: max((sure[one, two].low for two in order if two != one), default=0.0) for one in order}
    out = frozenset(one for one in order if lead[one] > MARGIN)
    could = [one for one in order if lead[one] <= SLOWER] or [min(order, key=lead.__getitem__)]
    raced = {one for one, two in behind if sure[one, two].value > MARGIN}
    for one in order:  # what is no faster than a simpler plan that is rejected is no reason to
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
    """Start plans again and again until the times decide.

    Args:
        complexity: Of each plan.
        start: Starts plans of these indices, all of them anew, and times them in turns: seconds per step by round. A plan
            that is missing in what it returns has failed and is out.
        beside: Plans that are timed to be shown, and cannot be chosen unless all others fail.
        is_over: Whether no further start fits into the time.
        reference: Plans that are started to the end though they are out, since others' speeds are given over theirs. Those
            ``beside`` are, too: the machine moves, and a speed over a plan has to have seen as much of it as the plan.
        without: Plans that are no longer in it.
        times: What earlier starts took, as it is returned.
        behind: As of :func:`decide`.

    Returns:
        The decision, and each plan's times by start, empty for those that it was not in.
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
            if starts > 1:  # how much the starts of what is out differ says nothing of the others
                gone = out
                racing = [one for one in racing if one not in gone or one in reference]
        found = start(racing)
        racing = [one for one in racing if one in found]
        for one in racing:
            taken[one] += [()] * (starts - len(taken[one]))
            taken[one].append(found[one])
