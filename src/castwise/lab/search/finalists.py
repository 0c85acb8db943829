"""Who comes to the final, and how: what was near in the race, with the settings that change no gradients and are the same for all.

Whether the optimizer is fused and whether freed memory is kept are not raced plan by plan: each is found once
(:mod:`castwise.lab.search.fusing`, :mod:`castwise.lab.search.keeping`), by what it saves the likeliest plan.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.search.axes import AUTOCAST, FP32, as_raced, complexity, numerics_of, run_with, storage_of
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
"""What takes this many times as long as the fastest in the race does not come to the final."""
WORTH, AT_MOST = 1.01, 1.05
"""A plan is in vain beside a simpler one if the race has it less than the first times as fast, and its interval ends below the
second."""
AS_GOOD = "is no more complicated, and about as fast in the race"
FINAL_SHARE = 0.85
"""Share of the budget after which no further start of the final begins."""
START_S = 0.5
"""What starting a process and building a model in it takes, about."""
SHOWN_ROUNDS = 3
"""Rounds that the model as it arrived, and a plan that was repaired, run in the race, so that they can come to the final."""


def room_in_final(context: Context, contest: Contest) -> int:
    """As many plans as can be started as often as they have to be, with fp32, autocast and some more, in the final.

    Two at least: the fastest of the race, and the simplest of those that were about as fast.
    """
    left_s = context.until(FINAL_SHARE) - context.ranks.now()
    return max(2, min(FINALISTS, int(left_s / STARTS / start_s(contest)) - 2))


def start_s(contest: Contest) -> float:
    """What one start of one plan takes in the final, about."""
    step_s = statistics.median(contest.entries[FP32].lap.seconds)
    return START_S + WARMUP * step_s + LEAST_ROUNDS * max(BLOCK_S, step_s)


def _slowness(contest: Contest, sound: Sequence[Plan]) -> dict[Plan, float]:
    """By plan, fp32 among them, the fastest first, how many times as long as the fastest it takes."""
    order = contest.order([FP32, *(plan for plan in sound if plan != FP32)])
    return {plan: contest.times_as_fast(order[0], over=plan) if plan != order[0] else 1.0 for plan in order}


def favourite(contest: Contest, sound: Sequence[Plan]) -> Plan:
    """The simplest of those about as fast as the fastest: what the final is likeliest to choose."""
    return min((p for p, slower in _slowness(contest, sound).items() if slower <= MARGIN), key=complexity)


def promising(contest: Contest, plans: Sequence[Plan]) -> list[Plan]:
    """Plans but for fp32, those first that the final wants first: the simplest of those as fast as the fastest, and that one.

    Of those that are near one of each numerics comes next, simpler ones first: the luck of the race alone would decide whether
    the final can fall back on it, and in which memory format, so that it is the simplest of those as fast as the fastest of its
    numerics. Then who else is near; then the others by their speed.
    """
    over = _slowness(contest, plans)
    order = [plan for plan in over if plan != FP32]
    near = [plan for plan in order if not _is_far(contest, plan, over)]
    kinds: dict[Plan, list[Plan]] = {}
    for plan in near:
        kinds.setdefault(numerics_of(plan), []).append(plan)
    one_each = [
        min((plan for plan in alike if over[plan] <= MARGIN * over[alike[0]]), key=complexity)
        for alike in kinds.values()
    ]
    simpler = [plan for plan in one_each if complexity(numerics_of(plan)) < complexity(numerics_of(near[0]))]
    first = [plan for plan in [favourite(contest, plans)] if plan != FP32]
    return list(dict.fromkeys([*first, *near[:1], *simpler, *one_each, *near, *order]))


def _is_far(contest: Contest, plan: Plan, over: Mapping[Plan, float]) -> bool:
    """Whether a plan is too far behind for a final: by a tenth, and not by what may be the luck of their rounds."""
    ratio = contest.ratio(next(iter(over)), plan)
    return over[plan] > FAR and (ratio is None or ratio.low > 1.0)


def in_vain(contest: Contest, plan: Plan, sound: Sequence[Plan]) -> Plan | None:
    """A sound plan for whose sake another need not be looked at: it is no more complicated, and about as fast in the race.

    There is none for one-line autocast, which is shown in any case, nor of another storage of parameters, which the race does not
    tell apart. Since it may be refused later, it has to be one of two that differ by more than rules of operators, or to be
    fp32, or of the same numerics.
    """
    if plan == AUTOCAST:
        return None
    kinds = {dataclasses.replace(numerics_of(other), ops=()) for other in sound} - {FP32}
    for rival in sound:
        safe = len(kinds) > 1 or numerics_of(rival) in (FP32, numerics_of(plan))
        simple = storage_of(rival) == storage_of(plan) and complexity(rival) <= complexity(plan)
        if safe and simple and rival != plan:
            ratio = contest.ratio(plan, over=rival)
            if ratio is not None and ratio.value < WORTH and ratio.high < AT_MOST:
                return rival
    return None


def in_order_of_promise(contest: Contest, left: Sequence[Plan]) -> list[Plan]:
    """What the race has left, the fastest first, as it is worth testing: promising plans, and fp32 before those it beats."""
    ahead = set(left[: left.index(FP32)]) if FP32 in left else set(left)
    order = promising(contest, left)
    return [
        *(p for p in order if p in ahead),
        *([FP32] if FP32 in left else []),
        *(p for p in order if p not in ahead),
    ]


def likeliest(journal: Journal, contest: Contest, sound: Sequence[Plan], most: int = FINALISTS) -> list[Plan]:
    """As many of the promising that are near as a final has time for, those last that are in vain beside the others.

    The fastest that computes in fp32 comes in any case.
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
                plan, Fate("spared", f"{out} {most} that were faster or simpler filled it", "race")
            )
        else:
            left.append(plan)
    return [plan for plan in sound if plan in left]


def race_repaired(contest: Contest, sound: Sequence[Plan]) -> list[Plan]:
    """Race plans that came by a repair, which were not timed yet, beside fp32; the sound plans but for those that cannot run."""
    repaired = [plan for plan in sound if plan not in contest.entries]
    if not repaired:
        return list(sound)
    contest.run(repaired, SHOWN_ROUNDS, until=math.inf)
    return [plan for plan in sound if contest.entries[plan].left is None] or [FP32]


def with_lossless(contest: Contest, sound: list[Plan]) -> list[Plan]:
    """Sound plans and the fastest of the race that computes in fp32: what is repaired can be slower than that."""
    raced = [plan for plan, entry in contest.entries.items() if entry.rounds and plan == as_raced(plan)]
    fastest = contest.order([plan for plan in raced if numerics_of(plan) == FP32])[0]
    if fastest in sound:
        return sound
    contest.entries[fastest].left = None
    return [*sound, fastest]


def run_as(journal: Journal, plans: Sequence[Plan], how: Plan) -> list[Plan]:
    """Finalists, the fastest first, with the optimizer and host memory of a plan; fp32 too if nothing else computes in it.

    As they raced they do not come to the final: what they are spared was measured, which says more than times of both.
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
