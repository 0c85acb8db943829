"""Which plans are sound: their gradients pass, as they are or repaired, or training runs decide what gradients leave in doubt.

Training runs take a third of the budget at most, before the final: it is among sound plans then, and has all the time that
is left. Only what is ahead of all that is sound in the race is trained, since doubt has to be worth something.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from castwise.core.model.resolve import assign, region_of
from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.parity.parity import FLOOR, ParityResult
from castwise.lab.search.axes import FP32, as_raced, numerics_of
from castwise.lab.search.contest import Contest
from castwise.lab.search.decision import LEAST as STARTS
from castwise.lab.search.decision import MARGIN
from castwise.lab.search.evidence import Verification
from castwise.lab.search.fates import Fate
from castwise.lab.search.finalists import AS_GOOD, FINAL_SHARE, in_vain, start_s
from castwise.lab.search.pairs import affordable_steps, in_training, is_doubtful, train_pairs
from castwise.lab.search.repair import VERIFYING
from castwise.lab.search.state import MICROBATCHES, SearchState
from castwise.lab.timing.failures import cannot_run, unfit

BY_NAME = 0.1
"""A plan that runs less than this share of the model's time low is nearly all fp32, and no candidate."""
TRAINING_SHARE = 0.35
"""Training runs may take this share of the budget; half of it where finalists are compiled after them."""
_TRAINING = "training runs"


def low_share(search: SearchState, plan: Plan) -> float:
    """Of the time that the model's parts take in fp32, the share of those that a plan runs low; 1 where none was timed."""
    assigned = assign(
        search.reference.test.prober.model, [region for region in plan.regions if region.compute is not None]
    )
    times_s = {
        part: search.costs[part.pattern].times_s["fp32"]
        for part in search.reference.parts
        if part.pattern in search.costs
    }
    low_s = 0.0
    for part, time_s in times_s.items():
        region = region_of(part.paths[0], assigned)
        low_s += time_s * ((plan.compute if region is None else region.compute) in LOW)
    whole_s = sum(times_s.values())
    return low_s / whole_s if whole_s else 1.0


def find_sound(search: SearchState, contest: Contest, plans: Sequence[Plan]) -> tuple[list[Plan], list[Plan]]:
    """Plans whose gradients pass, as they are or with more regions in fp32, and those that are in doubt; tested in this order.

    None is tested in vain, beside a sound one that is simpler and as fast.
    """
    sound: list[Plan] = []
    doubtful: list[Plan] = []
    for plan in plans:
        if plan == FP32:
            sound.append(plan)
            continue
        known = numerics_of(plan) in search.findings
        if not known and (rival := in_vain(contest, plan, sound)) is not None:
            search.decide(plan, Fate("untried", f"not tested: {in_words(rival)} {AS_GOOD}"))
            continue
        left = search.reference.numerics.left()
        if left < VERIFYING + MICROBATCHES and not known:
            spent = "not tested: the passes for numerics were spent on plans that are faster or simpler"
            search.decide(plan, Fate("untried", spent))
            continue
        found = search.find(plan)
        if found is not None and found.verdict == "pass":
            sound.append(plan)
            continue
        search.refuse(plan, why := search.why(plan, found))
        if may_train(search, found):
            doubtful.append(plan)
        if plan.params != "fp32" or left < VERIFYING + FLOOR or sound:
            continue  # a sound plan that promises more is there already, or its like with fp32 parameters is repaired
        repaired = search.repaired(plan, found)
        kept = sum(part.pattern in search.kept for part in search.reference.parts)
        if 2 * kept > len(search.reference.parts):
            search.refuse(
                plan, f"{why}; {kept} of {len(search.reference.parts)} regions would have to stay in fp32"
            )
            search.kept = {}
        elif (share := low_share(search, repaired)) < BY_NAME:
            search.refuse(
                plan,
                f"{why}; after repair nearly everything runs in fp32 ({share:.0%} of the time in {plan.compute})",
            )
            search.kept = {}
        elif repaired in search.findings and search.findings[repaired].verdict == "pass":
            sound.append(repaired)
    return sound or [FP32], doubtful


def may_train(search: SearchState, found: ParityResult | None) -> bool:
    """Whether training runs may decide about a plan whose gradients did not pass."""
    return search.settings.goal == "time" and found is not None and is_doubtful(found)


def cleared(
    search: SearchState, contest: Contest, sound: Sequence[Plan], doubtful: Sequence[Plan]
) -> list[Plan]:
    """Of the plans in doubt those whose numerics train like fp32; none is trained that a sound one is as fast as in the race."""
    each: dict[Plan, list[Plan]] = {}
    for plan in contest.order(doubtful):
        each.setdefault(numerics_of(plan), []).append(plan)
    after_s = (1.0 - FINAL_SHARE) * search.settings.budget_s + (1 + STARTS) * (len(sound) + 3) * start_s(
        contest
    )
    out: list[Plan] = []
    for plans in each.values():
        rival = contest.order([*sound, *out])[0]
        if not contest.times_as_fast(plans[0], over=rival) > MARGIN:
            more = f"; training runs were not spent on it, since in the race it was not 3 % faster than {in_words(rival)}"
        elif (found := training_runs(search, plans[0], after_s)) is None:
            more = ""
        elif found.verdict == "not worse":
            for plan in plans:
                del search.fates[plan]
            out += plans
            continue
        else:
            more = f", and in training {in_training(found)}"
        for plan in plans:
            search.refuse(plan, search.fates[plan].reason + more)
    return out


def training_runs(search: SearchState, plan: Plan, after_s: float = 0.0) -> Verification | None:
    """Pairs of training runs of a plan, as it raced, and fp32, once for its numerics; None where they cannot be.

    ``after_s`` is what has to be left of the budget after them.
    """
    plan, numerics, settings, contest = as_raced(plan), numerics_of(plan), search.settings, search.contest
    assert contest is not None
    if numerics in search.trained:
        return search.trained[numerics]
    share = TRAINING_SHARE if settings.compile == "never" else TRAINING_SHARE / 2.0
    spent_s = sum(stage.time_s for stage in search.stages if stage.name == _TRAINING)
    room_s = min(share * settings.budget_s - spent_s, search.left_s() - after_s)
    a_pair_s = sum(statistics.median(contest.entries[one].lap.seconds) for one in (FP32, plan))
    steps = affordable_steps(room_s, a_pair_s, settings.verify_seeds, settings.verify_steps)
    if not steps:
        search.undecided.append(
            f"{in_words(plan)} is in doubt by its gradients, and there was no time to let training runs decide; a longer "
            "--budget would."
        )
        return None
    contest.make_room()
    try:
        with search.stage(_TRAINING):
            search.trained[numerics] = train_pairs(
                search.workload, plan, search.device, steps=steps, seeds=settings.verify_seeds, first_seed=settings.seed,
                ranks=search.ranks, until_hopeless=True,
                on_progress=lambda done, total: search.say(search.now, "pairs of training runs", done, total),
            )  # fmt: skip
    except Exception as error:
        if search.ranks.size > 1 or not cannot_run(error):  # the others are in the midst of it
            raise
        search.notes.append(
            f"{in_words(plan)} is in doubt, and training runs could not decide: {unfit(error)}."
        )
        return None
    return search.trained[numerics]
