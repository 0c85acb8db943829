"""Answer ``goal="time"`` and ``goal="memory"``: find the fastest or the lightest plan whose gradients pass the test."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.passes.regions import exempt
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
from castwise.lab.search.final import Final
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
    with_lossless,
)
from castwise.lab.search.fusing import fused_saves
from castwise.lab.search.keeping import keeping_saves
from castwise.lab.search.pairs import in_training
from castwise.lab.search.part_costs import lacks_units, losing_parts, measure_costs, not_faster
from castwise.lab.search.peaks import measure_peaks
from castwise.lab.search.sound import (
    BY_NAME,
    against_updates,
    cleared,
    find_sound,
    low_share,
    may_train,
    training_runs,
    updates_of,
)
from castwise.lab.search.starts import race_final
from castwise.lab.search.state import Choice, Search
from castwise.lab.timing.stats import Ratio

COSTS_SHARE, COSTS_S = 0.1, 12.0
"""Timing the parts of the model takes at most this share of the budget, and at most this many seconds."""
RACE_SHARE = 0.35
"""No round of the race begins after this share of the time left at its start."""


def find_fastest(search: Search) -> None:
    """Find the plan for the goal, which is time or memory, and record it as the search's choice."""
    context, journal, reference = search.context, search.journal, search.reference
    settings, ranks = context.settings, context.ranks
    plans, dropped = ranks.at("the candidates").same(whole_step_plans(
        settings.formats, context.device, context.workload.optimizer(reference.model.parameters()),
        has_images=reference.images, goal=settings.goal, used=reference.used, sparse=reference.test.prober.sparse,
    ))  # fmt: skip
    for name, reason in dropped.items():
        if (
            name != "tf32" or settings.formats != FORMATS
        ):  # a user who allows all formats does not ask for tf32 in particular
            journal.notes.append(f"{name}: {reason}")
    with journal.stage("costs"):
        plans = with_plans_from_elsewhere(search, _by_costs(search, plans))
    left_s = context.left_s()
    deadline = ranks.now() + (RACE_SHARE * left_s if settings.goal == "time" else left_s)
    contest = Contest(
        context.workload, context.device, seed=settings.seed, deadline=deadline, on_progress=journal.tell,
        ranks=ranks,
    )  # fmt: skip
    with contest:
        search.race = contest
        (_fastest if settings.goal == "time" else _lightest)(search, plans)
    if search.as_given is not None:
        with journal.stage("as given"):
            _judge_as_given(search, search.as_given)


def _fastest(search: Search, plans: Sequence[Plan]) -> None:
    contest, journal, always = search.contest, search.journal, search.context.settings.compile == "always"
    with journal.stage("race"):
        left = contest.halve(plans, keep=FINALISTS)
        left = _with_operators(search, left)
        if search.as_given is not None:
            contest.run([search.as_given], SHOWN_ROUNDS)
    with journal.stage("parity"):
        found = find_sound(search, in_order_of_promise(contest, left))
        sound = with_lossless(contest, race_repaired(contest, found.plans))
    sound += cleared(search, sound, found.doubtful)
    how, saves = _how(search, favourite(contest, sound))
    running = likeliest(journal, contest, sound, room_in_final(search.context, contest))
    if how != as_raced(how):
        running = run_as(journal, contest.order(running), how)
    compiled = compile_finalists(search, running)
    # for this plan the separate measurement counts: it shows the saving more precisely than whole steps can
    shown = [FP32] if numerics_of(how) == FP32 and run_with(FP32, how) in set(running) - {FP32} else []
    eager = [plan for plan in dict.fromkeys([FP32, *running]) if plan not in shown]
    only = bool(compiled) and always
    final = _final(search, [*running, *compiled], [*shown, *(eager if only else [])])
    if shown:
        final.saves = saves
        if (slower := final.ratio(run_with(FP32, how), FP32)) is not None and _is_slower(final, slower):
            eager.insert(0, FP32)
            final.choice = {FP32, *final.choice}
            journal.notes.append(
                f"Plain fp32 could be chosen too, because whole steps contradict the separate measurement: in the final "
                f"{in_words(run_with(FP32, how))} was {slower.value:.2f} ({slower.low:.2f} to {slower.high:.2f}) times as fast as plain "
                "fp32."
            )
    choices = [compiled, eager] if only else [[*eager, *compiled]]
    turns = (final.in_turn(plans, journal.refusal) for plans in choices)
    search.choice = _choose(search, itertools.chain.from_iterable(turns), found.kept)
    journal.undecided += filter(None, [final.doubt(search.choice.plan, journal.refusal)])
    journal.notes += filter(None, [said(search, search.choice.plan)])


def _is_slower(final: Final, ratio: Ratio) -> bool:
    return round(ratio.high, 2) < 1.0 and final.starts >= STARTS


def _how(search: Search, plan: Plan) -> tuple[Plan, float]:
    """Decide whether to add the fused optimizer and kept host memory, which save time without changing gradients.

    Returns:
        The plan with the settings that are worth it, and the share of a step that they save together.
    """
    with search.journal.stage("fused optimizer"):
        fused = fused_saves(search.context, search.reference, search.contest, plan)
        if fused:
            plan = dataclasses.replace(plan, optimizer="fused")
    with search.journal.stage("page faults"):
        kept = keeping_saves(search.context, plan)
        return dataclasses.replace(plan, host_memory="keep") if kept else plan, fused + kept


def _final(search: Search, plans: Sequence[Plan], beside: Collection[Plan] = ()) -> Final:
    context = search.context
    with search.journal.stage("final"):
        search.final = race_final(
            context, search.contest, plans, context.until(FINAL_SHARE), beside, search.as_given
        )
        return search.final


def _lightest(search: Search, plans: Sequence[Plan]) -> None:
    context, journal, peaks = search.context, search.journal, search.peaks
    with journal.stage("memory"):
        given = [] if search.as_given is None else [search.as_given]
        for late in measure_peaks(context, peaks, [*plans, *given]):
            journal.decide(late, LATE)

    def lightness(plan: Plan) -> tuple[float, float]:
        """Return the sort key of a plan: peak memory to within 1 %, then complexity. Plans without a measurement come last."""
        peak = peaks.get(plan)
        return (math.inf if peak is None else round(math.log(peak) * 100), complexity(plan))

    left = sorted((p for p in plans if p in peaks), key=lightness) or [FP32]
    with journal.stage("parity"):
        found = find_sound(search, left)
    if repaired := [plan for plan in found.plans if plan not in peaks]:
        with journal.stage("memory"):
            measure_peaks(context, peaks, repaired)
    order = sorted(found.plans, key=lightness)
    search.choice = _choose(search, order, found.kept)
    sound = [plan for plan in order if not journal.refusal(plan)]
    _final(search, list(dict.fromkeys([search.choice.plan, *sound[:2]])))


# --- plans in the race --------------------------------------------------------------------------------------


def _by_costs(search: Search, plans: Sequence[Plan]) -> list[Plan]:
    """Drop formats that make no part of the model faster, and add plans that keep slower parts in fp32."""
    context, journal, reference = search.context, search.journal, search.reference
    settings, prober, parts = context.settings, reference.test.prober, reference.parts
    layout = "channels_last" if reference.images else "as_is"
    low = [name for name in settings.formats if name in LOW]
    search.costs = measure_costs(
        prober.model, context.workload.loss, prober.micros[0].batch, parts, low, context.device,
        channels_last=reference.images, budget_s=min(COSTS_S, COSTS_SHARE * settings.budget_s), on_progress=journal.tell,
        ranks=context.ranks,
    )  # fmt: skip
    out = list(plans)
    for name in low:
        reason = not_faster(name, low, search.costs) if settings.goal == "time" else ""
        hopeless = [pattern for pattern, cost in search.costs.items() if name in cost.reasons]
        if settings.goal == "memory" and hopeless:
            reason = f"{hopeless[0]} {search.costs[hopeless[0]].reasons[name]}"
        if reason:
            journal.notes.append(f"{name} was dropped before the race: {reason}.")
            # without units for the format, one step would take as long as all other plans together
            shown = None if lacks_units(name, search.costs) else AUTOCAST
            out = _without(search, out, name, reason, but=shown)
            continue
        if settings.goal == "memory":
            continue
        losers = losing_parts(name, search.costs, parts)
        if hopeless:  # no whole step in this format is run
            out = _without(search, out, name, f"{hopeless[0]} {search.costs[hopeless[0]].reasons[name]}")
        least = sum(not set(hopeless).isdisjoint(group) for group in losers)
        sets = {sum(losers[:count], ()) for count in (len(losers), max(least, len(losers) // 2))} - {()}
        new = [
            exempt(plan, parts, patterns)
            for patterns in sorted(sets)
            for plan in plans
            if plan.compute == name and plan.rules != "none" and plan.memory_format == layout
        ]
        for plan in new:
            if (share := low_share(reference, search.costs, plan)) < BY_NAME:
                why = f"nearly everything would still run in fp32 ({share:.0%} of the time in {name})"
                journal.decide(search.scaled(plan), Fate("worse", why))
            else:
                out.append(plan)
    return [search.scaled(plan) for plan in each_numerics_first(out)]


def each_numerics_first(plans: Sequence[Plan]) -> list[Plan]:
    """Reorder plans so that even a short race times at least one plan of each numerics.

    Plans have the same numerics if they compute the same gradients (:func:`~castwise.lab.search.axes.numerics_of`). First comes
    the simplest plan of each numerics, then the next simplest of each, and so on.
    """
    seen: dict[Plan, int] = {}
    order = []
    for plan in sorted(plans, key=complexity):
        turn = seen[numerics_of(plan)] = seen.get(numerics_of(plan), -1) + 1
        order.append((turn, plan != AUTOCAST, plan))
    return [plan for _, _, plan in sorted(order, key=lambda one: one[:2])]


def with_plans_from_elsewhere(search: Search, plans: Sequence[Plan]) -> list[Plan]:
    """Add the plans that earlier searches found for the same job elsewhere, if their formats take part in the race."""
    raced = {plan.compute for plan in plans}
    # keep only the settings that the race does not decide itself
    bare = as_raced if search.context.settings.goal == "time" else as_trained
    elsewhere = (bare(plan) for plan in search.context.elsewhere if plan.formats <= raced)
    return list(dict.fromkeys([*elsewhere, *plans]))


def _without(
    search: Search, plans: Sequence[Plan], low: str, why: str, but: Plan | None = None
) -> list[Plan]:
    """Remove the plans that compute in the format ``low``, except ``but``, and record the reason."""
    gone = [plan for plan in plans if plan.compute == low and plan != but]
    for plan in gone:
        search.journal.decide(search.scaled(plan), Fate("worse", why))
    return [plan for plan in plans if plan not in gone]


def _with_operators(search: Search, left: list[Plan]) -> list[Plan]:
    """Race variants of the two fastest plans in which norms, softmax and losses keep the dtype of their inputs."""
    contest, used, device = search.contest, search.reference.used, search.context.device
    # autocast that is raced only for display, in a dropped format, gets no variants
    others = any(plan.compute == AUTOCAST.compute for plan in contest.entries if plan != AUTOCAST)
    leaders = [plan for plan in left[:2] if others or plan != AUTOCAST]
    variants = [with_operators_as_is(plan, used, device.type) for plan in leaders]
    new = [plan for plan in variants if plan is not None and plan not in left]
    return contest.halve([*left, *new], rounds=4, heats=1) if new else left


def formats_not_reached(search: Search) -> list[str]:
    """Return the low formats in which no plan was tried because the time ran out."""
    entries = search.race.entries if search.race is not None else {}
    late = {plan.compute for plan, entry in entries.items() if entry.left == LATE}
    slow = {
        plan.compute
        for plan, entry in entries.items()
        if entry.left is not None and entry.left.kind == "worse"
    }
    return sorted(late - slow - {plan.compute for plan, entry in entries.items() if entry.rounds})


def _choose(search: Search, order: Iterable[Plan], kept: Mapping[Plan, Mapping[str, str]]) -> Choice:
    """Choose the first plan that passes the gradient test on fresh batches, or that nearly passes and trains like fp32.

    ``kept`` gives, for each repaired plan, the reason why each part of the model stays in fp32.
    """
    journal = search.journal
    for plan in order:
        numerics = numerics_of(plan)
        if journal.refusal(plan):  # it was refused together with a plan that computes the same gradients
            continue
        if numerics == FP32:
            return Choice(plan)
        with journal.stage("verification"):
            result = search.reference.numerics.verify(plan)
        why = ""
        if result.verdict != "pass":
            why = f"on fresh batches: {search.why(plan, result)}"
            training = training_runs(search, plan) if may_train(search, result) else None
            if training is not None:
                why = (
                    f"{why}, and in training {in_training(training)}"
                    if training.verdict != "not worse"
                    else ""
                )
        if not (why := why or against_updates(search, plan)):
            return Choice(plan, result, kept.get(numerics, {}), search.training.get(numerics))
        journal.refuse(plan, why)
    return Choice()


def _judge_as_given(search: Search, plan: Plan) -> None:
    """Measure how the formats in which the user's model is stored change its gradients and updates."""
    found, search.updates_as_given = search.find(plan), updates_of(search, plan)
    said = [search.why(plan, found)] if found is None or found.verdict != "pass" else []
    if search.updates_as_given is not None and search.updates_as_given.why:
        said.append(search.updates_as_given.why)
    if said:
        search.journal.decide(plan, Fate("unsound", "; ".join(said)))  # about the model as it is stored
