"""``goal="time"`` and ``goal="memory"``: the fastest, or lightest, plan whose gradients pass."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.parity.updates import LOST, lost_updates
from castwise.lab.search.axes import (
    AUTOCAST,
    FORMATS,
    FP32,
    as_raced,
    as_trained,
    complexity,
    numerics_of,
    run_with,
    whole_step_plans,
    with_operators_as_is,
)
from castwise.lab.search.compiling import compile_finalists, said
from castwise.lab.search.contest import LATE, Contest
from castwise.lab.search.decision import LEAST as STARTS
from castwise.lab.search.fates import Fate
from castwise.lab.search.finalists import (
    FINAL_SHARE,
    FINALISTS,
    SHOWN_ROUNDS,
    favourite,
    in_order_of_promise,
    likeliest,
    race_repaired,
    room_in_final,
    run_as,
    start_s,
    with_lossless,
)
from castwise.lab.search.fusing import saves_time
from castwise.lab.search.keeping import saves_page_faults
from castwise.lab.search.pairs import in_training
from castwise.lab.search.part_costs import lacks_units, losing_parts, measure_costs, not_faster
from castwise.lab.search.regions import exempt
from castwise.lab.search.sound import BY_NAME, cleared, find_sound, low_share, may_train, training_runs
from castwise.lab.search.starts import race_final
from castwise.lab.search.state import SearchState

COSTS_SHARE, COSTS_S = 0.1, 12.0
"""The costs of parts may take this share of the budget, and this long."""
RACE_SHARE, COMPILE_SHARE = 0.35, 0.6
"""After this share of what is left no round of the race begins; after this of the budget no second plan is compiled."""


def find_fastest(search: SearchState) -> None:
    """Find the plan and settle it."""
    settings, model, test = search.settings, search.reference.model, search.reference.test
    plans, dropped = search.ranks.at("the candidates").same(whole_step_plans(
        settings.formats, search.device, search.workload.optimizer(model.parameters()),
        has_images=search.reference.images, goal=settings.goal, used=search.reference.used, sparse=test.prober.sparse,
    ))  # fmt: skip
    for name, reason in dropped.items():
        if name != "tf32" or settings.formats != FORMATS:  # nobody who allows all formats asks for that one
            search.notes.append(f"{name}: {reason}")
    with search.stage("costs"):
        plans = with_plans_from_elsewhere(search, _by_costs(search, plans))
    left_s = search.left_s()
    deadline = search.ranks.now() + (RACE_SHARE * left_s if settings.goal == "time" else left_s)
    contest = Contest(
        search.workload, search.device, seed=settings.seed, deadline=deadline,
        on_progress=lambda what, done, total: search.say(search.now, what, done, total), ranks=search.ranks,
    )  # fmt: skip
    with contest:
        search.contest = contest
        (_fastest if settings.goal == "time" else _lightest)(search, contest, plans)
    if search.as_given is not None:
        with search.stage("as given"):
            _judge_as_given(search, search.as_given)


def _fastest(search: SearchState, contest: Contest, plans: Sequence[Plan]) -> None:
    with search.stage("race"):
        left = contest.halve(plans, keep=FINALISTS)
        left = _with_operators(search, contest, left)
        if search.as_given is not None:
            contest.run([search.as_given], SHOWN_ROUNDS)
    with search.stage("parity"):
        sound, doubtful = find_sound(search, contest, in_order_of_promise(contest, left))
        race_repaired(contest, sound)
    sound = with_lossless(contest, sound)
    sound += cleared(search, contest, sound, doubtful)
    alike = [why for plan in search.fates if numerics_of(plan) == AUTOCAST and (why := search.refusal(plan))]
    if alike and AUTOCAST not in sound and not search.refusal(AUTOCAST):
        search.refuse(AUTOCAST, alike[0])  # it left the race in this memory format, and is shown all the same
    how = _how(search, favourite(contest, sound))
    running = likeliest(search, contest, sound, room_in_final(search, contest))
    if how != as_raced(how):
        running = run_as(search, contest.order(running), how)
    compiled = _compiled(search, contest, running)
    always = bool(compiled) and search.settings.compile == "always"
    # what sets it apart from its twin was measured by itself, which knows more than whole steps will
    shown = [FP32] if numerics_of(how) == FP32 and run_with(FP32, how) in set(running) - {FP32} else []
    eager = [plan for plan in dict.fromkeys([FP32, *running]) if plan not in shown]
    _final(search, [*running, *compiled], [*shown, *(eager if always else [])])
    assert search.final is not None
    twin = search.final.ratio(run_with(FP32, how), FP32)
    if shown and twin is not None and round(twin.high, 2) < 1.0 and search.final.starts >= STARTS:
        eager.insert(0, FP32)
        search.final.choice = {FP32, *search.final.choice}
        search.notes.append(
            f"Whole steps say otherwise, so that fp32 as it is was to be chosen too: {in_words(run_with(FP32, how))} was "
            f"{twin.value:.2f} ({twin.low:.2f} to {twin.high:.2f}) times as fast in the final."
        )
    if not shown:
        search.spared = 0.0
    choices = [compiled, eager] if always else [[*eager, *compiled]]
    turns = (search.final.in_turn(plans, search.refusal) for plans in choices)
    _choose(search, itertools.chain.from_iterable(turns))
    search.undecided += filter(None, [search.final.doubt(search.chosen, search.refusal)])
    search.notes += filter(None, [said(search, search.chosen)])


def _how(search: SearchState, plan: Plan) -> Plan:
    """A plan with what spares it time and changes no numerics: the fused optimizer, and memory that is kept."""
    with search.stage("fused optimizer"):
        if saves_time(search, plan):
            plan = dataclasses.replace(plan, optimizer="fused")
    with search.stage("page faults"):
        return dataclasses.replace(plan, host_memory="keep") if saves_page_faults(search, plan) else plan


def _compiled(search: SearchState, contest: Contest, plans: Sequence[Plan]) -> list[Plan]:
    """Finalists compiled; the first may take all that a final has no need of."""
    if search.settings.compile == "never":
        return []
    with search.stage("compiling"):
        until = search.start + COMPILE_SHARE * search.settings.budget_s
        in_final = STARTS * len({FP32, AUTOCAST, *plans}) * start_s(contest)
        last = search.start + FINAL_SHARE * search.settings.budget_s - in_final
        return compile_finalists(search, plans, until, max(until, last))


def _final(search: SearchState, plans: Sequence[Plan], beside: Collection[Plan] = ()) -> None:
    with search.stage("final"):
        search.final = race_final(
            search, plans, search.start + FINAL_SHARE * search.settings.budget_s, beside
        )


def _lightest(search: SearchState, contest: Contest, plans: Sequence[Plan]) -> None:
    with search.stage("memory"):
        for late in search.measure_peaks([*plans, *([] if search.as_given is None else [search.as_given])]):
            search.decide(late, LATE)

    def lightness(plan: Plan) -> tuple[float, float]:
        """Peak memory to within a hundredth, then complexity; a plan that was not measured comes last."""
        peak = search.peaks.get(plan)
        return (math.inf if peak is None else round(math.log(peak) * 100), complexity(plan))

    left = sorted((p for p in plans if p in search.peaks), key=lightness) or [FP32]
    with search.stage("parity"):
        sound, _ = find_sound(search, contest, left)
    if repaired := [plan for plan in sound if plan not in search.peaks]:
        with search.stage("memory"):
            search.measure_peaks(repaired)
    order = sorted(sound, key=lightness)
    _choose(search, order)
    _final(search, list(dict.fromkeys([search.chosen, *order[:2]])))


# --- what is raced ------------------------------------------------------------------------------------------


def _by_costs(search: SearchState, plans: Sequence[Plan]) -> list[Plan]:
    """Drop formats that are faster nowhere, and add candidates with the losing parts in fp32."""
    settings, test = search.settings, search.reference.test
    layout = "channels_last" if search.reference.images else "as_is"
    low = [name for name in settings.formats if name in LOW]
    search.costs = measure_costs(
        test.prober.model, search.workload.loss, test.prober.micros[0].batch, search.reference.parts, low, search.device,
        channels_last=search.reference.images, budget_s=min(COSTS_S, COSTS_SHARE * settings.budget_s), on_progress=search.tell,
        ranks=search.ranks,
    )  # fmt: skip
    out = list(plans)
    for name in low:
        reason = not_faster(name, low, search.costs) if settings.goal == "time" else ""
        hopeless = [pattern for pattern, cost in search.costs.items() if name in cost.reasons]
        if settings.goal == "memory" and hopeless:
            reason = f"{hopeless[0]} {search.costs[hopeless[0]].reasons[name]}"
        if reason:
            search.notes.append(f"{name} was dropped before the race: {reason}.")
            # where the device has no units for it, a step of it would take as long as all others
            shown = None if lacks_units(name, search.costs) else AUTOCAST
            out = _without(search, out, name, reason, but=shown)
            continue
        if settings.goal == "memory":
            continue
        losers = losing_parts(name, search.costs, search.reference.parts)
        if hopeless:  # no whole step of it is ever run
            out = _without(search, out, name, f"{hopeless[0]} {search.costs[hopeless[0]].reasons[name]}")
        least = sum(not set(hopeless).isdisjoint(group) for group in losers)
        sets = {sum(losers[:count], ()) for count in (len(losers), max(least, len(losers) // 2))} - {()}
        new = [
            exempt(plan, search.reference.parts, patterns)
            for patterns in sorted(sets)
            for plan in plans
            if plan.compute == name and plan.rules != "none" and plan.memory_format == layout
        ]
        for plan in new:
            if (share := low_share(search, plan)) < BY_NAME:
                why = f"nearly everything would still run in fp32 ({share:.0%} of the time in {name})"
                search.decide(search.scaled(plan), Fate("worse", why))
            else:
                out.append(plan)
    return [search.scaled(plan) for plan in each_numerics_first(out)]


def each_numerics_first(plans: Sequence[Plan]) -> list[Plan]:
    """The simplest plan of each numerics, then the next of each: a race that ends early has seen something of all."""
    seen: dict[Plan, int] = {}
    order = []
    for plan in sorted(plans, key=complexity):
        turn = seen[numerics_of(plan)] = seen.get(numerics_of(plan), -1) + 1
        order.append((turn, plan != AUTOCAST, plan))
    return [plan for _, _, plan in sorted(order, key=lambda one: one[:2])]


def with_plans_from_elsewhere(search: SearchState, plans: Sequence[Plan]) -> list[Plan]:
    """What was chosen for the same job elsewhere, where its formats are raced here, and candidates."""
    raced = {plan.compute for plan in plans}
    # what a search does not find out by itself is part of the plan
    bare = as_raced if search.settings.goal == "time" else as_trained
    elsewhere = (bare(plan) for plan in search.elsewhere if plan.formats <= raced)
    return list(dict.fromkeys([*elsewhere, *plans]))


def _without(
    search: SearchState, plans: Sequence[Plan], low: str, why: str, but: Plan | None = None
) -> list[Plan]:
    """The plans that compute in another format, or are the one to keep; of the rest it is noted why they are gone."""
    gone = [plan for plan in plans if plan.compute == low and plan != but]
    for plan in gone:
        search.decide(search.scaled(plan), Fate("worse", why))
    return [plan for plan in plans if plan not in gone]


def _with_operators(search: SearchState, contest: Contest, left: list[Plan]) -> list[Plan]:
    """Race the leaders with norms, softmax and losses that follow their inputs."""
    # autocast that is raced to be shown, of a format that was dropped, leads to nothing
    others = any(plan.compute == AUTOCAST.compute for plan in contest.entries if plan != AUTOCAST)
    leaders = [plan for plan in left[:2] if others or plan != AUTOCAST]
    variants = [with_operators_as_is(plan, search.reference.used, search.device.type) for plan in leaders]
    new = [plan for plan in variants if plan is not None and plan not in left]
    return contest.halve([*left, *new], rounds=4, heats=1) if new else left


def formats_not_reached(search: SearchState) -> list[str]:
    """Low formats of which there were candidates, and no time for any."""
    entries = search.contest.entries if search.contest is not None else {}
    late = {plan.compute for plan, entry in entries.items() if entry.left == LATE}
    slow = {
        plan.compute
        for plan, entry in entries.items()
        if entry.left is not None and entry.left.kind == "worse"
    }
    return sorted(late - slow - {plan.compute for plan, entry in entries.items() if entry.rounds})


def _choose(search: SearchState, order: Iterable[Plan]) -> None:
    """Settle the first of some plans that passes on fresh batches, or that trains like fp32 where it is in doubt."""
    kept = search.kept
    for plan in order:
        if search.refusal(plan):  # refused as another of the same numerics was
            continue
        if numerics_of(plan) == FP32:
            search.settle(plan, None)
            return
        with search.stage("verification"):
            result = search.reference.numerics.verify(plan)
            lost = _lost(search, plan)
        why = f"rounding drops {lost:.0%} of its updates" if lost is not None and lost > LOST else ""
        if not why and result.verdict != "pass":
            why = f"on fresh batches: {search.why(plan, result)}"
            training = training_runs(search, plan) if may_train(search, result) else None
            if training is not None:
                why = (
                    f"{why}, and in training {in_training(training)}"
                    if training.verdict != "not worse"
                    else ""
                )
        if not why:
            search.verification = search.trained.get(numerics_of(plan))
            regions = any(region.compute == "fp32" for region in plan.regions)
            search.settle(plan, result, kept if regions else None)
            return
        others = search.final.plans if search.final is not None else []
        for other in [plan, *(other for other in others if numerics_of(other) == numerics_of(plan))]:
            search.refuse(other, why)
    search.settle(FP32, None)


def _judge_as_given(search: SearchState, plan: Plan) -> None:
    """Find out what the model's own storage does to its gradients and its updates."""
    found, search.lost_as_given = search.find(plan), _lost(search, plan)
    said = [search.why(plan, found)] if found is None or found.verdict != "pass" else []
    if search.lost_as_given is not None and search.lost_as_given > LOST:
        said.append(f"rounding drops {search.lost_as_given:.0%} of its updates")
    if said:
        search.refuse(plan, "; ".join(said))


def _lost(search: SearchState, plan: Plan) -> float | None:
    workload, seed = search.workload, search.settings.seed
    model = search.reference.model

    def share() -> float | None:
        batches = iter(workload.batches(seed))
        return lost_updates(model, workload.loss, batches, workload.optimizer, plan, search.device, seed)

    lost: float | None = search.ranks.at("lost updates").worst(share, lambda found: found or 0.0)
    return lost
