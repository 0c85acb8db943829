"""Find the plans that are sound, which means that their gradients pass the test or that they train like fp32.

A plan that fails is repaired with fp32 regions if possible. If a plan nearly passes, training runs decide.

Training runs take at most a third of the budget. They come before the final comparison, which then compares only sound plans
and has the remaining time. A plan is trained only if it was faster in the race than every sound plan.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from castwise.core.model.resolve import assign, region_of
from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.parity.batches import epochs_of
from castwise.lab.parity.parity import FLOOR, ParityResult
from castwise.lab.parity.updates import AFTER, Training, UpdateLoss, UpdateTest, is_needed
from castwise.lab.search.axes import FP32, as_raced, numerics_of
from castwise.lab.search.decision import LEAST as STARTS
from castwise.lab.search.decision import MARGIN
from castwise.lab.search.evidence import Verification
from castwise.lab.search.fates import Fate
from castwise.lab.search.finalists import AS_GOOD, FINAL_SHARE, in_vain, start_s
from castwise.lab.search.pairs import LATE, MOST, affordable_steps, in_training, is_doubtful, train_pairs
from castwise.lab.search.part_costs import Cost
from castwise.lab.search.reference import MICROBATCHES, Reference
from castwise.lab.search.repair import VERIFYING
from castwise.lab.search.state import Search
from castwise.lab.timing.failures import cannot_run, unfit

BY_NAME = 0.1
"""A plan is almost entirely fp32, and not tried, if less than this share of the model's time is spent in a low format."""
TRAINING_SHARE = 0.35
"""Share of the budget that training runs may take; half of it if plans are compiled afterwards."""
UPDATES_SHARE = 0.2
"""Share of the time left that the comparison of updates may take. The first steps are always compared."""
_TRAINING = "training runs"


def low_share(reference: Reference, costs: Mapping[str, Cost], plan: Plan) -> float:
    """Return the share of the model's time that is spent, in fp32, in the parts that a plan runs in a low format.

    Return 1 if no part was timed.
    """
    assigned = assign(
        reference.test.prober.model, [region for region in plan.regions if region.compute is not None]
    )
    times_s = {part: costs[part.pattern].times_s["fp32"] for part in reference.parts if part.pattern in costs}
    low_s = 0.0
    for part, time_s in times_s.items():
        region = region_of(part.paths[0], assigned)
        low_s += time_s * ((plan.compute if region is None else region.compute) in LOW)
    whole_s = sum(times_s.values())
    return low_s / whole_s if whole_s else 1.0


@dataclass
class Sound:
    """The plans whose gradients pass the test, and the plans for which training runs may decide.

    Attributes:
        plans: Plans whose gradients pass, as given or repaired; fp32 if there is no other.
        doubtful: Plans for which training runs may decide.
        kept: For each repaired plan (by its numerics), the reason for each part that stays in fp32, by pattern.
    """

    plans: list[Plan] = field(default_factory=list)
    doubtful: list[Plan] = field(default_factory=list)
    kept: dict[Plan, Mapping[str, str]] = field(default_factory=dict)


def find_sound(search: Search, plans: Sequence[Plan]) -> Sound:
    """Test the gradients of plans in the given order, and repair those that fail by keeping more regions in fp32.

    A plan is not tested if a plan that has already passed is simpler and about as fast.
    """
    out, journal, parts = Sound(), search.journal, search.reference.parts
    for plan in plans:
        if plan == FP32:
            out.plans.append(plan)
            continue
        known = numerics_of(plan) in search.parity
        if not known and (rival := in_vain(search.contest, plan, out.plans)) is not None:
            journal.decide(plan, Fate("untried", f"not tested: {in_words(rival)} {AS_GOOD}"))
            continue
        left = search.reference.numerics.left()
        if left < VERIFYING + MICROBATCHES and not known:
            spent = "not tested: faster or simpler plans used all passes of the gradient test"
            journal.decide(plan, Fate("untried", spent))
            continue
        found = search.find(plan)
        if found is not None and found.verdict == "pass":
            out.plans.append(plan)
            continue
        journal.refuse(plan, why := search.why(plan, found))
        if may_train(search, found):
            out.doubtful.append(plan)
        if plan.params != "fp32" or left < VERIFYING + FLOOR or out.plans:
            continue  # a better plan has passed, or the same plan with fp32 parameters is repaired instead
        repair = search.repaired(plan, found)
        kept = sum(part.pattern in repair.kept for part in parts)
        share = low_share(search.reference, search.costs, repair.plan)
        if 2 * kept > len(parts):
            journal.refuse(plan, f"{why}; {kept} of {len(parts)} regions would have to stay in fp32")
        elif share < BY_NAME:
            nearly = (
                f"after repair nearly everything runs in fp32 ({share:.0%} of the time in {plan.compute})"
            )
            journal.refuse(plan, f"{why}; {nearly}")
        elif (found := search.parity.get(numerics_of(repair.plan))) and found.verdict == "pass":
            out.plans.append(repair.plan)
            out.kept[numerics_of(repair.plan)] = repair.kept
    out.plans = out.plans or [FP32]
    return out


def may_train(search: Search, found: ParityResult | None) -> bool:
    """Whether training runs may decide about a plan whose gradients did not pass."""
    return search.context.settings.goal == "time" and found is not None and is_doubtful(found)


def cleared(search: Search, sound: Sequence[Plan], doubtful: Sequence[Plan]) -> list[Plan]:
    """Train plans whose gradients nearly passed the test, and return those that train like fp32.

    A plan is not trained if a plan of ``sound`` was as fast in the race. Plans with the same gradients are trained once.
    """
    contest, journal = search.contest, search.journal
    each: dict[Plan, list[Plan]] = {}
    for plan in contest.order(doubtful):
        each.setdefault(numerics_of(plan), []).append(plan)
    final_s = (1 + STARTS) * (len(sound) + 3) * start_s(contest)
    after_s = (1.0 - FINAL_SHARE) * search.context.settings.budget_s + final_s
    out: list[Plan] = []
    for plans in each.values():
        rival = contest.order([*sound, *out])[0]
        if not contest.times_as_fast(plans[0], over=rival) > MARGIN:
            more = (
                f"; it had no training runs, since in the race it was not 3 % faster than {in_words(rival)}"
            )
        elif (found := training_runs(search, plans[0], after_s)) is None:
            more = ""
        elif found.verdict == "not worse":
            journal.clear(numerics_of(plans[0]))
            out += plans
            continue
        else:
            more = f", and in training {in_training(found)}"
        journal.refuse(plans[0], journal.refusal(plans[0]) + more)
    return out


def against_updates(search: Search, plan: Plan) -> str:
    """Say why a plan with bf16 or fp16 parameters fails the test of its updates, as a clause; empty if it passes.

    A plan without masters must also train like fp32, because the compared steps show nothing about later steps.
    """
    updates = updates_of(search, plan)
    if updates is None or updates.why or not plan.lacks_masters:
        return "" if updates is None else updates.why
    if updates.unknown:
        return updates.unknown
    trained = training_runs(search, plan)
    if trained is None:
        return "it has no masters, and no training runs could be made to test it"
    return "" if trained.verdict == "not worse" else f"in training {in_training(trained)}"


def updates_of(search: Search, plan: Plan) -> UpdateLoss | None:
    """Compare a plan's updates with fp32's, and return the worst result of all ranks.

    For a plan that stores nothing in bf16 or fp16, return None.

    The comparison has several stages, and all ranks run the same number. They stop when a rank has found a fault or has no time
    for another stage.
    """
    if not is_needed(plan):
        return None
    context, ranks = search.context, search.context.ranks
    workload, seed = epochs_of(context.workload), context.settings.seed
    until = ranks.now() + UPDATES_SHARE * context.left_s()

    def begin() -> Training:
        model, batches = search.reference.model, iter(workload.batches(seed))
        return Training(model, workload.loss, batches, workload.optimizer, context.device, seed)

    with contextlib.closing(ranks.at("updates").each(begin)) as training:
        test = UpdateTest(training, plan)
        while True:
            heard = ranks.at("a stage of updates").every(lambda: (test.stage(), test.next_s))
            found = max((found for found, _ in heard), key=lambda found: (found.severity, found.still))
            left = [next_s for _, next_s in heard if next_s is not None]
            if (
                found.why
                or len(left) < len(heard)
                or (found.steps > AFTER[1] and ranks.now() + max(left) > until)
            ):
                return found


def training_runs(search: Search, plan: Plan, after_s: float = 0.0) -> Verification | None:
    """Train pairs of runs, in fp32 and under the plan as it was raced, and return the result; None if that is impossible.

    Plans that compute the same gradients are trained once. ``after_s`` is the number of seconds of the budget that must be left
    afterwards.
    """
    plan, numerics, contest, context = as_raced(plan), numerics_of(plan), search.contest, search.context
    why = "stores parameters without masters" if plan.lacks_masters else "has an undecided gradient test"
    settings, ranks, journal = context.settings, context.ranks, context.journal
    if numerics in search.training:
        return search.training[numerics]
    share = TRAINING_SHARE if settings.compile == "never" else TRAINING_SHARE / 2.0
    spent_s = sum(stage.time_s for stage in journal.stages if stage.name == _TRAINING)
    room_s = min(share * settings.budget_s - spent_s, context.left_s() - after_s)
    if not (plan in contest.entries and contest.entries[plan].rounds):
        contest.run([FP32, plan], rounds=1)
        if not contest.entries[plan].rounds:
            return None
    a_pair_s = sum(statistics.median(contest.entries[one].lap.seconds) for one in (FP32, plan))
    most = LATE if plan.lacks_masters else MOST
    steps = affordable_steps(room_s, a_pair_s, settings.verify_seeds, settings.verify_steps, most)
    if not steps:
        journal.undecided.append(
            f"{in_words(plan)} {why}, and there was no time for training runs to decide; use a longer --budget."
        )
        return None
    contest.make_room()
    try:
        with journal.stage(_TRAINING):
            search.training[numerics] = train_pairs(
                epochs_of(context.workload), plan, context.device, steps=steps, seeds=settings.verify_seeds, first_seed=settings.seed,
                ranks=ranks, until_hopeless=True,
                on_progress=lambda done, total: journal.tell("pairs of training runs", done, total),
            )  # fmt: skip
    except Exception as error:
        if ranks.size > 1 or not cannot_run(error):  # with several ranks, the others are still in the runs
            raise
        journal.notes.append(f"{in_words(plan)} {why}, and training runs could not decide: {unfit(error)}.")
        return None
    return search.training[numerics]
