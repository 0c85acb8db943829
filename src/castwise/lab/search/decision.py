"""Choose one of several plans by their measured times: pure functions, and the loop that calls them.

The rule takes the simplest plan that is known to be within 3 % of every other. It rejects a simpler plan only if that plan is
known to be slower than another, by these times or by an earlier race that these times do not contradict. While neither is known
for a simpler plan, all plans are started and timed again. If the time runs out, the simpler plan is taken, and the decision
says that the machine was too noisy. After two starts the rule demands much clearer evidence than later: on a quiet machine a
third start would add nothing, and on a noisy one chance would end a third of the searches there.

Every plan is started anew several times in a process of its own, and the processes run in turns
(:mod:`castwise.lab.timing.apart`). The difference between two plans is computed per start
(:func:`castwise.lab.timing.stats.restarts`), because the drift of the machine affects both, and a process that is fast or slow
by chance for its whole life is one sample per start. ``bench/bench_decision.py`` simulates how often the rule errs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from castwise.lab.timing import stats

MARGIN = 1.03
"""A chosen plan may take this many times as long as the best: a smaller gain does not justify a more complicated plan."""
BEHIND = 1.05
"""The race shows that a plan is slower only if it takes at least this many times as long as the other: a race in one process is
off by up to 4 % (bench/results/race-cpu.json)."""
SLOWER = 1.0075
"""A simpler plan is rejected if it is known to take at least this many times as long; an equally fast plan rarely measures that
slow."""
LIKELY, SURE, EARLY = 0.975, 0.97, 0.99
"""Two-sided confidence for two claims, that the chosen plan is within the margin and that a simpler plan is slower, and for
both after the fewest starts. The claims are tested after every start; the resulting error rate is simulated."""
STRICT = 0.995
"""The same for the first claim if plans do not vary alike: each is then known from its own starts alone."""
ROUNDS = 8
"""Rounds of each start. Fewer rounds need more starts, and each start rebuilds all models; on a quiet machine more rounds only
take longer."""
LEAST, MOST = 2, 16
"""The smallest and largest number of starts; a single start does not show how much starts differ."""


@dataclass(frozen=True)
class Decision:
    """The result of the rule.

    Attributes:
        chosen: Index of the plan to take.
        decided: Whether the chosen plan is known to be within 3 % of the best, and every simpler one to be slower.
        out: Plans known to be more than 3 % slower than another.
    """

    chosen: int
    decided: bool
    out: frozenset[int] = frozenset()


One = TypeVar("One")


def among(pairs: Collection[tuple[One, One]], left: Sequence[One]) -> frozenset[tuple[int, int]]:
    """The pairs with both members in this list, as indices into it."""
    return frozenset((left.index(one), left.index(two)) for one, two in pairs if {one, two}.issubset(left))


def decide(
    complexity: Sequence[float],
    times_s: Sequence[Sequence[Sequence[float]]],
    behind: Collection[tuple[int, int]] = (),
    levels: tuple[float, float] = (LIKELY, SURE),
) -> Decision:
    """Choose among plans.

    Args:
        complexity: One value per plan, for at least one plan; among equals the earlier plan counts as simpler.
        times_s: For each plan, seconds per step by start and round, as :func:`castwise.lab.timing.stats.restarts` takes them.
        behind: Pairs (slower, faster) known from a race (``BEHIND``). A pair counts if the estimate from these times is beyond
            the margin too. It never settles the decision; that takes these times.
        levels: Confidence that the chosen plan is within the margin, and that others are slower.
    """
    order = sorted(range(len(complexity)), key=lambda index: (complexity[index], index))
    likely = stats.restarts(times_s, levels[0], strict=STRICT)
    sure = stats.restarts(
        times_s, levels[1]
    )  # without a bound on few starts: a choice for lack of time uses all that is known
    strict = stats.restarts(times_s, levels[1], strict=levels[1])
    lead = {one: max((sure[one, two].low for two in order if two != one), default=0.0) for one in order}
    out = frozenset(one for one, two in strict if strict[one, two].low > MARGIN)
    could = [one for one in order if lead[one] <= SLOWER] or [min(order, key=lead.__getitem__)]
    raced = {one for one, two in behind if sure[one, two].value > MARGIN}
    for one in order:  # a plan no faster than a rejected simpler one rejects no other
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
    """Start plans repeatedly until the times decide.

    Args:
        complexity: Complexity of each plan.
        start: Starts the plans with these indices anew and times them in turns; returns seconds per step by round. A plan
            missing from the result has failed and is out.
        beside: Plans that are timed for display only; they can be chosen only if all others fail.
        is_over: Returns whether the time is too short for another start.
        reference: Plans that are started to the end even if they are out, because speeds are given relative to them. The same
            holds for those ``beside``: the machine drifts, and two plans are comparable only over the same starts.
        without: Plans that are already out.
        times: Times of earlier starts, in the returned form.
        behind: As for :func:`decide`.

    Returns:
        The decision, and each plan's times by start, empty for starts without it.
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
            if starts > 1:  # the spread of plans that are out says nothing about the others
                gone = out
                racing = [one for one in racing if one not in gone or one in reference]
        found = start(racing)
        racing = [one for one in racing if one in found]
        for one in racing:
            taken[one] += [()] * (starts - len(taken[one]))
            taken[one].append(found[one])
