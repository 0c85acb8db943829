"""Select the plans that enter the final comparison, and the settings that all of them share.

Plans that were nearly the fastest in the race enter the final comparison. All of them use the same optimizer kernel and host
memory, which change no gradients.

The fused optimizer and kept host memory are not raced for each plan. Each is decided once, by the time that it saves for the
plan most likely to win (:mod:`castwise.lab.search.fusing`, :mod:`castwise.lab.search.keeping`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.search.axes import AUTOCAST, FP32, as_raced, numerics_of, run_with, storage_of
from castwise.lab.search.contest import Contest
from castwise.lab.search.context import Context, Journal
from castwise.lab.search.decision import LEAST as STARTS
from castwise.lab.search.decision import MARGIN
from castwise.lab.search.fates import Fate
from castwise.lab.search.final import ran_as
from castwise.lab.timing.apart import BLOCK_S, LEAST_ROUNDS
from castwise.lab.timing.timing import WARMUP

FINALISTS = 5
FAR = 1.1
"""A plan that takes this many times as long as the fastest in the race does not enter the final comparison."""
WORTH, AT_MOST = 1.01, 1.05
"""A plan is unnecessary next to a simpler plan if it is hardly faster: its speed ratio in the race is below ``WORTH``, and the
upper end of the ratio's interval is below ``AT_MOST``."""
AS_GOOD = "is no more complicated and about as fast in the race"
FINAL_SHARE = 0.85
"""Share of the budget after which no start of the final comparison begins, except the first."""
START_S = 0.5
"""Approximate seconds that it takes to start a process and build a model in it."""
SHOWN_ROUNDS = 3
"""Number of rounds that the model as given, or a repaired plan, runs in the race so that it can enter the final comparison."""


def room_in_final(context: Context, contest: Contest) -> int:
    """Return how many plans can take part in the final comparison in the time left, besides fp32 and autocast.

    The result is at least two: the fastest plan of the race, and the simplest of those about as fast.
    """
    left_s = context.until(FINAL_SHARE) - context.ranks.now()
    return max(2, min(FINALISTS, int(left_s / STARTS / start_s(contest)) - 2))


def start_s(contest: Contest) -> float:
    """Return the approximate seconds that one start of one plan takes in the final comparison."""
    step_s = statistics.median(contest.entries[FP32].lap.seconds)
    return START_S + WARMUP * step_s + LEAST_ROUNDS * max(BLOCK_S, step_s)


def _slowness(contest: Contest, sound: Sequence[Plan]) -> dict[Plan, float]:
    """Return, for fp32 and each given plan, how many times as long as the fastest plan it takes; the fastest comes first."""
    order = contest.order([FP32, *(plan for plan in sound if plan != FP32)])
    return {plan: contest.times_as_fast(order[0], over=plan) if plan != order[0] else 1.0 for plan in order}


def favourite(contest: Contest, sound: Sequence[Plan]) -> Plan:
    """Return the plan that the final comparison will most likely choose: the simplest of those about as fast as the fastest."""
    return min(
        (p for p, slower in _slowness(contest, sound).items() if slower <= MARGIN), key=contest.complexity
    )


def promising(contest: Contest, plans: Sequence[Plan]) -> list[Plan]:
    """Sort the plans other than fp32 by how much they promise for the final comparison.

    First comes the simplest of the plans that are about as fast as the fastest, then the fastest itself.

    Plans near the fastest may compute different gradients, in other words have different numerics
    (:func:`~castwise.lab.search.axes.numerics_of`). Next comes one plan for each numerics, simpler numerics first. The final
    comparison can then fall back on any numerics, whatever the noise of the race. The plan is the simplest of those that are
    about as fast as the fastest plan with its numerics. Then come the other plans near the fastest, then the rest by speed.
    """
    over = _slowness(contest, plans)
    order = [plan for plan in over if plan != FP32]
    near = [plan for plan in order if not _is_far(contest, plan, over)]
    kinds: dict[Plan, list[Plan]] = {}
    for plan in near:
        kinds.setdefault(numerics_of(plan), []).append(plan)
    one_each = [
        min((plan for plan in alike if over[plan] <= MARGIN * over[alike[0]]), key=contest.complexity)
        for alike in kinds.values()
    ]
    simpler = [
        plan
        for plan in one_each
        if contest.complexity(numerics_of(plan)) < contest.complexity(numerics_of(near[0]))
    ]
    first = [plan for plan in [favourite(contest, plans)] if plan != FP32]
    return list(dict.fromkeys([*first, *near[:1], *simpler, *one_each, *near, *order]))


def _is_far(contest: Contest, plan: Plan, over: Mapping[Plan, float]) -> bool:
    """Whether a plan is too slow for the final comparison: by more than a tenth, and by more than the noise of its rounds."""
    ratio = contest.ratio(next(iter(over)), plan)
    return over[plan] > FAR and (ratio is None or ratio.low > 1.0)


def in_vain(contest: Contest, plan: Plan, sound: Sequence[Plan]) -> Plan | None:
    """Return a plan of ``sound`` that makes ``plan`` unnecessary: no more complicated, and about as fast in the race.

    One-line autocast is never unnecessary because it is always shown. Plans that store parameters differently are not compared,
    because the race cannot separate them. The returned plan may be refused later. It must therefore be fp32 or compute the same
    gradients as ``plan``, unless at least two plans of ``sound`` differ in more than operator rules.
    """
    if plan == AUTOCAST:
        return None
    kinds = {dataclasses.replace(numerics_of(other), ops=()) for other in sound} - {FP32}
    for rival in sound:
        safe = len(kinds) > 1 or numerics_of(rival) in (FP32, numerics_of(plan))
        simple = storage_of(rival) == storage_of(plan) and contest.complexity(rival) <= contest.complexity(
            plan
        )
        if safe and simple and rival != plan:
            ratio = contest.ratio(plan, over=rival)
            if ratio is not None and ratio.value < WORTH and ratio.high < AT_MOST:
                return rival
    return None


def in_order_of_promise(contest: Contest, left: Sequence[Plan]) -> list[Plan]:
    """Return the remaining plans in the order in which to test them.

    The promising plans come first (:func:`promising`), but fp32 comes before the plans that it beats.
    """
    ahead = set(left[: left.index(FP32)]) if FP32 in left else set(left)
    order = promising(contest, left)
    return [
        *(p for p in order if p in ahead),
        *([FP32] if FP32 in left else []),
        *(p for p in order if p not in ahead),
    ]


def likeliest(journal: Journal, contest: Contest, sound: Sequence[Plan], most: int = FINALISTS) -> list[Plan]:
    """Return the plans that enter the final comparison: the most promising plans near the fastest, at most ``most``.

    Plans that others make unnecessary are considered last. fp32 and the fastest other plan with fp32's gradients are always
    included, and do not count. The reason why a plan is left out is recorded in the journal.
    """
    over = _slowness(contest, sound)
    lossless = [plan for plan in over if numerics_of(plan) == FP32 != plan][:1]
    rivals = promising(contest, sound)
    order = sorted(rivals, key=lambda plan: in_vain(contest, plan, rivals) is not None)
    left = [FP32, *lossless]
    for plan in order:
        if plan in lossless:
            continue
        out = "not in the final:"
        if _is_far(contest, plan, over):
            slow = f"takes {over[plan]:.2f} times as long as {in_words(next(iter(over)))} in the race"
            journal.decide(plan, Fate("worse", f"{out} {slow}", "race"))
        elif (rival := in_vain(contest, plan, left)) is not None:
            journal.decide(plan, Fate("spared", f"{out} {in_words(rival)} {AS_GOOD}", "race"))
        elif len(left) - len([FP32, *lossless]) == most:
            journal.decide(
                plan, Fate("spared", f"{out} its {most} places went to faster or simpler plans", "race")
            )
        else:
            left.append(plan)
    return [plan for plan in sound if plan in left]


def race_repaired(contest: Contest, sound: Sequence[Plan]) -> list[Plan]:
    """Race those plans of ``sound`` that have not been timed, and return all plans of ``sound`` that can run.

    Plans that have not been timed are repaired plans, which did not exist when the race began.
    """
    repaired = [plan for plan in sound if plan not in contest.entries]
    if not repaired:
        return list(sound)
    contest.run(repaired, SHOWN_ROUNDS, until=math.inf)
    return [plan for plan in sound if contest.entries[plan].left is None] or [FP32]


def with_lossless(contest: Contest, sound: list[Plan]) -> list[Plan]:
    """Add to ``sound`` the fastest plan that computes fp32's gradients, because repaired plans can be slower than it."""
    raced = [plan for plan, entry in contest.entries.items() if entry.rounds and plan == as_raced(plan)]
    fastest = contest.order([plan for plan in raced if numerics_of(plan) == FP32])[0]
    if fastest in sound:
        return sound
    contest.entries[fastest].left = None
    return [*sound, fastest]


def run_as(journal: Journal, plans: Sequence[Plan], how: Plan) -> list[Plan]:
    """Give all plans of the final comparison the optimizer kernel and host memory of one plan.

    Plans without these settings do not enter the final comparison: the time saved was measured directly, which is more precise
    than comparing the times of both. fp32 without them takes part only if it is the fastest plan with fp32's gradients.

    Args:
        journal: Records why the plans without these settings were spared.
        plans: The plans, fastest first.
        how: The plan with the optimizer kernel and host memory to use.
    """
    lossless = [plan for plan in plans if numerics_of(plan) == FP32]
    running = [plan for plan in plans if plan != FP32 or lossless[:1] == [FP32]]
    out = []
    for plan in running:
        made = run_with(plan, how)
        for other in {plan, dataclasses.replace(made, host_memory="as_given")} - {made, FP32}:
            journal.decide(other, ran_as(made))
        out.append(made)
    return out
