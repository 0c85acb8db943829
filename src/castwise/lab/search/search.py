"""Run a search: race plans, test the gradients of the fast ones, and test the best one again on fresh data.

1. *Reference.* The fp32 gradients of a few microbatches are computed. This finds a loss that is not differentiable, data with
   NaN, and a loss that is not deterministic.
2. *Costs.* Every unique module is timed alone in each format, including casts. A format that is faster in no module is dropped.
   The parts of the model that are slower in the low format become fp32 regions of further plans.
3. *Race.* Every combination of the settings of a whole step, and of those regions, is timed on real steps by successive
   halving.
4. *Parity.* The gradients of the remaining plans are tested. If a plan fails, the source is found, and fp32 regions repair the
   plan. If a plan is faster than every plan that passes, and it nearly passes itself, training runs against fp32 decide.
5. *Final.* The plans that passed are timed once more, for longer. They use the fused optimizer and keep freed memory, if these
   save time. Among equally fast plans the simplest is chosen.
6. *Verification.* The gradients of the chosen plan are tested on fresh batches. If it fails there, the final decides on the
   next plan.

The ranks of a process group search in lockstep: each rank runs all stages, and every value that could differ between ranks is
agreed through :mod:`castwise.lab.timing.ranks`.

Stages 2 to 6 are in :mod:`castwise.lab.search.fastest`. With ``goal="numerics"``, :mod:`castwise.lab.search.exemptions`
replaces them and only searches for the regions that must stay in fp32. With ``goal="inference"``, all stages are in
:mod:`castwise.lab.search.inference`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable

from castwise.core.casting.trees import to_device
from castwise.core.model.arrival import widen_
from castwise.core.plans.words import in_words
from castwise.errors import StateError
from castwise.lab.parity.batches import epochs_of
from castwise.lab.parity.parity import ParityTest
from castwise.lab.parity.probes import Prober
from castwise.lab.passes.isolation import seed_all, undisturbed
from castwise.lab.search.arrived import arrival_notes
from castwise.lab.search.axes import AUTOCAST, FP32, as_trained, numerics_of
from castwise.lab.search.compiling import own_cache
from castwise.lab.search.contest import Entry
from castwise.lab.search.exemptions import find_exemptions
from castwise.lab.search.fastest import find_fastest, formats_not_reached
from castwise.lab.search.inference import find_for_inference
from castwise.lab.search.pairs import in_training, is_doubtful, train_pairs
from castwise.lab.search.peaks import LEAST_S as PEAKS_S
from castwise.lab.search.peaks import measure_peaks
from castwise.lab.search.reference import MICROBATCHES, refer
from castwise.lab.search.repair import VERIFYING, NumericsSearch
from castwise.lab.search.sound import against_updates
from castwise.lab.search.state import Choice, Search
from castwise.lab.timing.runners import build_model
from castwise.lab.timing.timing import synchronize

LEAST_S = 5.0
"""A search with fewer seconds than this cannot give any result."""
WARMUP, LEAST_WARMUP, WARMUP_SHARE, TIMED = 300, 50, 0.03, 3
"""If the user sets no number of fp32 steps before the second test of gradients: as many as take ``WARMUP_SHARE`` of the budget, at
most ``WARMUP``, by the quickest of ``TIMED`` steps. With fewer than ``LEAST_WARMUP`` there is no second test."""


def run(search: Search) -> None:
    """Run the search. If an exception interrupts it, including KeyboardInterrupt, ``search`` keeps the results so far.

    Raises:
        CastwiseError: The workload cannot be tuned because it fails in fp32 or there is no time.
    """
    context, journal = search.context, search.journal
    settings, ranks = context.settings, context.ranks
    if ranks.size > 1:
        journal.notes.append(
            f"Measured on {ranks.size} ranks at once, each with the same weights and batches: times and peak memory "
            "are the slowest and largest rank's, and gradients the worst rank's. The times exclude the reduction of "
            "gradients across ranks."
        )
    if settings.budget_s < LEAST_S:
        raise StateError(
            f"tune(budget_s={settings.budget_s:g}): too short; a search needs at least {LEAST_S:g} s, and one or two "
            "minutes for a useful answer"
        )
    with (
        undisturbed(),
        context.home,
        own_cache() if settings.compile != "never" else contextlib.nullcontext(),
    ):
        if settings.goal == "inference":
            find_for_inference(search)
        else:
            _find_for_training(search)
    if missed := formats_not_reached(search):
        journal.undecided.append(
            f"{' and '.join(missed)} {'was' if len(missed) == 1 else 'were'} not tried: the time ran out. A longer "
            f"--budget would tell whether {'it is' if len(missed) == 1 else 'they are'} faster."
        )
    search.complete = not missed


def _find_for_training(search: Search) -> None:
    context, journal = search.context, search.journal
    settings = context.settings
    with journal.stage("reference"):
        if settings.goal != "numerics":
            context.home.begin()
        search.begun = refer(context)
        context.home.ready(context.left_here_s())
    context.set_patience()
    if settings.goal == "numerics":
        find_exemptions(search)
    else:
        find_fastest(search)
    if numerics_of(search.choice.plan) != FP32:
        with journal.stage("second look"):
            _second_look(search)
    steps = search.choice.verification.steps if search.choice.verification is not None else 0
    if search.choice.plan != FP32 and settings.verify_steps > steps:
        with journal.stage("training runs"):
            _train(search)
    if settings.memory and settings.goal == "time" and context.left_s() > PEAKS_S:
        shown = [AUTOCAST] if search.contest.entries.get(AUTOCAST, Entry(AUTOCAST)).rounds else []
        compiles_s = {plan: trial.compile_s for plan, trial in search.trials.items()}
        with journal.stage("memory"):
            measure_peaks(context, search.peaks, [FP32, *shown, search.choice.plan], compiles_s)
    if (note := search.reference.test.prober.positions.note) and numerics_of(search.choice.plan) != FP32:
        journal.notes.append(note)
    if search.arrived:
        journal.notes += arrival_notes(search)


def _may_warm_up(search: Search) -> bool:
    """Whether fp32 steps before the second test of gradients may fit into their share of the budget, before any is taken."""
    settings, context = search.context.settings, search.context
    if settings.warmup_steps is not None:
        return settings.warmup_steps > 0
    laps = search.race.entries[FP32].lap.seconds if search.race is not None else []
    first = search.journal.stages[0]  # its passes take about as long as steps
    least_s = LEAST_WARMUP * statistics.median(laps) if laps else first.time_s / max(1, first.passes)
    share_s, left_s = WARMUP_SHARE * settings.budget_s, context.left_s()
    return context.ranks.at("the second test").same(least_s <= share_s < left_s)


def _warmup(search: Search, train: Callable[[], None]) -> int:
    """Train in fp32 before the second test of gradients, and return the number of steps; 0 for no second test."""
    settings, context = search.context.settings, search.context
    asked, share_s = settings.warmup_steps, WARMUP_SHARE * settings.budget_s
    times: list[float] = []
    steps = TIMED if asked is None else asked
    while len(times) < steps:
        search.journal.tell("fp32 steps", len(times), steps)
        begin = time.perf_counter()
        train()
        times.append(time.perf_counter() - begin)
        if asked is None and len(times) <= TIMED:
            fit = min(WARMUP, int(share_s / min(times)))
            late = sum(times) > share_s or (len(times) == TIMED and fit < LEAST_WARMUP)
            late, fit = context.ranks.at("the second test").same((late, fit))
            if late:
                return 0
            steps = fit if len(times) == TIMED else TIMED
    return steps


def _second_look(search: Search) -> None:
    """Test the chosen plan again after some fp32 training steps, because trained weights differ from fresh weights."""
    context, journal, reference = search.context, search.journal, search.reference
    settings, workload = context.settings, epochs_of(context.workload)
    if not _may_warm_up(search):
        return
    seed_all(settings.seed)
    model = build_model(workload, context.device, settings.seed, reference.model.state_dict())
    arrived = widen_(model)
    optimizer = workload.optimizer(model.parameters())
    batches = iter(workload.batches(settings.seed))

    def train() -> None:
        optimizer.zero_grad()
        workload.loss(model, to_device(next(batches), context.device)).backward()
        optimizer.step()
        synchronize(context.device)

    search.warmed = _warmup(search, train)
    if not search.warmed:
        return
    optimizer.zero_grad()
    prober = Prober(
        model, workload.loss, batches, context.device, seed=settings.seed, call=reference.test.prober.call,
        arrived=arrived,
    )  # fmt: skip
    warm = ParityTest(prober, reference.test.per_update, reference.test.adam, workload.optimizer)
    warm.reference(MICROBATCHES)
    numerics = NumericsSearch(warm, reference.parts, journal.tell, context.ranks)
    plan, result = search.choice.plan, numerics.find(search.choice.plan)
    if result.verdict == "pass":  # on few microbatches; trained weights may do damage in a few of many
        result = numerics.verify(plan)
    trained = search.choice.verification is not None and is_doubtful(
        result
    )  # training runs have already shown that the plan trains like fp32
    if result.verdict == "pass" or trained:
        search.choice = dataclasses.replace(search.choice, verified=result)
    else:
        journal.refuse(plan, f"after {search.warmed} steps: {search.why(plan, result)}")
        search.parity[numerics_of(plan)] = result
        numerics.renew()
        repair = numerics.repair(plan, result, reserve=VERIFYING)
        plan, result = repair.plan, numerics.verify(repair.plan)
        why = search.why(plan, result) if result.verdict != "pass" else against_updates(search, plan)
        if repair.keeps_all(reference.parts):
            why = "every part of the model would be in fp32"
        if why:
            journal.refuse(plan, why)
        search.choice = Choice() if why else Choice(plan, result, repair.kept)
    search.parity[numerics_of(plan)] = result
    journal.notes.append(
        f"The gradient test after {search.warmed} fp32 steps: {result.verdict}; {result.reason}."
    )


def _train(search: Search) -> None:
    context, journal, plan = search.context, search.journal, search.choice.plan
    settings = context.settings
    trained = train_pairs(
        context.workload, as_trained(plan), context.device, steps=settings.verify_steps, seeds=settings.verify_seeds,
        first_seed=settings.seed, ranks=context.ranks,
        on_progress=lambda done, total: journal.tell("pairs of training runs", done, total),
    )  # fmt: skip
    search.choice = dataclasses.replace(search.choice, verification=trained)
    if trained.verdict == "worse":
        journal.refuse(plan, f"in training {in_training(trained)}")
        journal.notes.append(
            f"{in_words(plan)} passed the gradient test and failed in training; the plan is fp32."
        )
        search.choice = Choice(verification=trained)
