"""Start the plans of the final comparison, each in its own process or, if that is impossible, all in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from castwise.core.plans.plan import Plan
from castwise.lab.search.axes import AUTOCAST, FP32, as_raced, numerics_of
from castwise.lab.search.contest import Contest
from castwise.lab.search.context import Context
from castwise.lab.search.decision import BEHIND, LEAST, ROUNDS, among, settle
from castwise.lab.search.fates import Fate
from castwise.lab.search.final import Final, Refused, nobody
from castwise.lab.search.peaks import LEAST_S as PEAKS_S
from castwise.lab.timing.apart import Timed, race_apart
from castwise.lab.timing.failures import cannot_run, unfit
from castwise.lab.timing.processes import NotThereError, not_there

OVERRUN = 1.5
"""After this many budgets even the second start is skipped, although one start does not show how much starts differ."""


def race_final(
    context: Context,
    contest: Contest,
    eligible: Sequence[Plan],
    until: float,
    beside: Collection[Plan] = (),
    as_given: Plan | None = None,
) -> Final:
    """Start and time plans repeatedly, until their times decide which to choose.

    Args:
        context: The job to tune.
        contest: The race in which the plans took part. Its models are released.
        eligible: The plans to choose from; fp32 is always added.
        until: Clock time by which the third and later starts must end. The first start always runs.
        beside: Plans among the eligible ones and fp32 that are only shown and cannot be chosen.
        as_given: The plan that runs a model with bf16 or fp16 parameters unchanged. If it was raced, it is shown for
            comparison, like autocast.

    Raises:
        Exception: An error under fp32 in this process. An error under another plan is raised too, unless it means that the plan
            cannot run.
    """
    ranks, journal, runs = context.ranks, context.journal, contest.entries
    beside_all = [plan for plan in (AUTOCAST, as_given) if plan is not None and plan in runs]
    shows = [
        plan
        for plan in beside_all
        if (left := runs[plan].left) is None or (left.kind == "worse" and runs[plan].rounds)
    ]
    plans = list(dict.fromkeys([FP32, *eligible, *shows]))
    choice = {FP32, *eligible}.difference(beside)
    final = Final(plans, choice=choice, complexity=contest.complexity, behind=_behind_in_race(contest, plans))
    taken_s = 0.0

    def over() -> bool:
        last = until if starts >= LEAST else context.until(OVERRUN)
        nothing = choice.issubset(final.failed)  # every plan that may be chosen has failed
        return starts > 0 and (ranks.now() + taken_s > last or nothing)

    def note(found: Mapping[int, Timed]) -> dict[int, Sequence[float]]:
        for index, timed in found.items():
            if timed.error is not None:
                if plans[index] == FP32:  # fp32 has already run in this process
                    raise not_there(context.spec or context.workload, timed.error) from timed.error
                if not cannot_run(timed.error):
                    raise timed.error
                final.failed.add(plans[index])
                journal.decide(plans[index], Fate("failed", unfit(timed.error), "final"))
            else:
                final.losses.setdefault(plans[index], timed.losses)
        return {index: timed.times_s for index, timed in found.items() if timed.error is None}

    starts = 0

    def apart(payload: bytes, racing: Sequence[int]) -> dict[int, Sequence[float]]:
        nonlocal starts, taken_s
        begin = ranks.now()
        share = max(1, LEAST - starts)
        what = (
            f"start {starts + 1}: {len(racing)} plan{'s' * (len(racing) > 1)}, each in a process of its own"
        )
        journal.tell(what, 0, ROUNDS)
        found = race_apart(
            context.home, payload, [plans[index] for index in racing], context.device, rounds=ROUNDS,
            first=starts * ROUNDS, seed=context.settings.seed, kind=contest.kind, until=begin + (until - begin) / share,
            on_round=lambda done: journal.tell(what, done, ROUNDS), ranks=ranks,
        )  # fmt: skip
        starts += 1
        contest.steps += sum(len(timed.losses) for timed in found)
        taken_s = ranks.now() - begin
        return note(dict(zip(racing, found, strict=True)))

    def decide_by(
        start: Callable[[Sequence[int]], Mapping[int, Sequence[float]]],
        is_over: Callable[[], bool],
        left: Collection[Plan] = choice,
        refused: Refused = nobody,
    ) -> None:
        def places(those: Callable[[Plan], bool]) -> frozenset[int]:
            return frozenset(i for i, plan in enumerate(plans) if those(plan))

        final.decision, final.times_s = settle(
            [contest.complexity(plan) for plan in plans], start, is_over=is_over, reference=places(lambda plan: plan == FP32),
            beside=places(lambda plan: plan not in left), times=final.times_s,
            without=places(lambda plan: (plan in choice and bool(refused(plan))) or plan in final.failed),
            behind=among(final.behind, plans),
        )  # fmt: skip

    def go_on(left: Collection[Plan], refused: Refused) -> None:
        nonlocal until
        if all(numerics_of(plan) == FP32 for plan in left):  # no time for verification is needed afterwards
            until = max(until, context.until(1.0) - PEAKS_S)
        try:
            with journal.stage("final"):
                decide_by(partial(apart, context.payload()), over, left, refused)
        except NotThereError as error:
            journal.notes.append(f"The finalists were not started again: {error}.")

    contest.close()
    try:
        decide_by(partial(apart, context.payload()), over)
        final.go_on = go_on
    except NotThereError as error:
        journal.notes.append(f"The finalists were timed once, in one process: {error}.")
        final.apart = False
        decide_by(lambda racing: _here(contest, [plans[i] for i in racing], racing, until), lambda: True)
    return final


def _behind_in_race(contest: Contest, plans: Collection[Plan]) -> dict[tuple[Plan, Plan], float]:
    """Return how many times as fast the second plan of each pair (slower, faster) was in the race, if that is certain."""
    eager = [plan for plan in plans if plan.compile == "as_given"]
    out = {}
    for one, two in itertools.permutations(eager, 2):
        fast, slow = as_raced(two), as_raced(one)
        if contest.times_as_fast(fast, slow) > BEHIND:
            ratio = contest.ratio(fast, slow)
            if ratio is not None and ratio.low > BEHIND:
                out[one, two] = ratio.value
    return out


def _here(
    contest: Contest, plans: Sequence[Plan], indices: Sequence[int], until: float
) -> dict[int, list[float]]:
    """Run one start of plans in this process, and return their times by index."""
    before = len(contest.entries[FP32].times_s)
    for plan in plans:  # a plan that left the race may run again here
        if plan in contest.entries:
            contest.entries[plan].left = None
    contest.run(plans, 2 * ROUNDS, until=until)
    times = {
        index: contest.entries[plan].times_s[before:] for index, plan in zip(indices, plans, strict=True)
    }
    return {index: [t for t in found if t is not None] for index, found in times.items() if None not in found}
