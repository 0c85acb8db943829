"""Find the fastest plan for a model that is only served: its outputs must be as good as those of fp32.

1. *Reference.* The fp32 outputs of some batches are computed. This finds outputs that are random or change their shapes.
2. *Race.* The settings of a whole call are timed in turns (:class:`~castwise.lab.search.contest.Contest`).
3. *Outputs.* The outputs of the remaining plans are tested (:class:`~castwise.lab.serve.comparison.OutputTest`). If a plan fails,
   the modules that cause most of the error stay in fp32.
4. *Final.* The plans that passed are started in processes of their own, until it is decided which to choose. Of equally fast
   plans the simplest is chosen.
5. *Verification.* The outputs of the chosen plan are tested on fresh batches, and so are the metrics of the workload's
   ``evaluate``. If it fails there, the next plan is taken.
6. *Memory* and *latency.* Peak memory, and the times of single calls at each batch size, of fp32 and of the chosen plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from castwise.core import amounts, devices
from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.passes.regions import exempt
from castwise.lab.search.arrived import arrival_notes
from castwise.lab.search.axes import (
    AUTOCAST,
    FORMATS,
    FP32,
    numerics_of,
    run_with,
    whole_step_plans,
    with_operators_as_is,
)
from castwise.lab.search.compiling import compile_finalists, said
from castwise.lab.search.contest import Contest, Entry
from castwise.lab.search.evidence import BY_AUTOCAST, Latency
from castwise.lab.search.fates import Fate
from castwise.lab.search.finalists import (
    AS_GOOD,
    FINAL_SHARE,
    FINALISTS,
    SHOWN_ROUNDS,
    favourite,
    in_order_of_promise,
    in_vain,
    likeliest,
    race_repaired,
    room_in_final,
    run_as,
    with_lossless,
)
from castwise.lab.search.keeping import keeping_saves
from castwise.lab.search.peaks import LEAST_S as PEAKS_S
from castwise.lab.search.peaks import measure_peaks
from castwise.lab.search.reference import Served, refer_served
from castwise.lab.search.starts import race_final
from castwise.lab.search.state import Choice, Search
from castwise.lab.serve.comparison import OutputTest
from castwise.lab.serve.result import OutputParity
from castwise.lab.timing.apart import SeparateRun
from castwise.lab.timing.failures import cannot_run, unfit
from castwise.lab.timing.processes import NotThereError
from castwise.lab.timing.runners import InferenceRun

RACE_SHARE = 0.5
"""No round of the race begins after this share of the time left at its start."""
TO_COMPILE_S = 90.0
"""With less time left after the race, two plans enter the final beside fp32, so that there is time to compile one."""
LEAST_CALLS, CALLS, CALLS_S = 5, 200, 6.0
"""Single calls of each plan that are timed for a latency: at least ``LEAST_CALLS``, at most ``CALLS``, and after the least none
once all plans together have taken ``CALLS_S`` seconds, or half of the time that is left for this batch size."""
WARM = 3
"""Calls before those that are timed, two more if the plan compiles."""


def find_for_inference(search: Search) -> None:
    """Find the fastest plan for inference, and record it as the search's choice."""
    context, journal = search.context, search.journal
    with journal.stage("reference"):
        context.home.begin()
        found = refer_served(context)
        context.home.ready(context.left_here_s())
    context.set_patience()
    search.served = found
    plans, dropped = whole_step_plans(
        context.settings.formats,
        context.device,
        None,
        has_images=found.images,
        goal="inference",
        used=found.used,
    )
    for name, reason in dropped.items():
        if name != "tf32" or context.settings.formats != FORMATS:
            journal.notes.append(f"{name}: {reason}")
    stored = found.as_given.compute if found.as_given is not None else "fp32"
    deadline = context.ranks.now() + RACE_SHARE * context.left_s()
    with Contest(
        context.workload, context.device, kind=InferenceRun, stored=stored, seed=context.settings.seed, deadline=deadline,
        on_progress=journal.tell, ranks=context.ranks,
    ) as contest:  # fmt: skip
        search.race = contest
        with journal.stage("race"):
            left = contest.halve(_not_hopeless(search, plans), keep=FINALISTS)
            new = [with_operators_as_is(plan, found.used, context.device.type) for plan in left[:2]]
            if variants := [plan for plan in new if plan is not None and plan not in left]:
                left = contest.halve([*left, *variants], rounds=4, heats=1)
            if found.as_given is not None:
                contest.run([found.as_given], SHOWN_ROUNDS)
        with journal.stage("outputs"):
            sound = _find_sound(search, found, in_order_of_promise(contest, left))
            sound = with_lossless(contest, race_repaired(contest, sound))
            if found.as_given is not None:
                _judge_as_given(search, found, found.as_given)
        hurries = context.settings.compile != "never" and context.left_s() < TO_COMPILE_S
        running = likeliest(journal, contest, sound, 2 if hurries else room_in_final(context, contest))
        how = favourite(contest, sound)
        with journal.stage("page faults"):
            if keeping_saves(context, how):
                how = dataclasses.replace(how, host_memory="keep")
                running = run_as(journal, contest.order(running), how)
        tried = running if hurries else sound
        compiled = compile_finalists(search, [run_with(plan, how) for plan in tried])
        always = bool(compiled) and context.settings.compile == "always"
        shown = [FP32] if run_with(FP32, how) in set(running) - {FP32} else []
        choices = compiled if always else [plan for plan in (FP32, *running, *compiled) if plan not in shown]
        with journal.stage("final"):
            until = context.until(FINAL_SHARE)
            beside = [FP32, *running] if always else shown
            final = race_final(context, contest, [*running, *compiled], until, beside, found.as_given)
            search.final = final
    search.choice = _choose(search, found, final.in_turn(choices, journal.refusal))
    journal.undecided += filter(None, [final.doubt(search.choice.plan, journal.refusal)])
    journal.notes += filter(None, [said(search, search.choice.plan)])
    compared = list(dict.fromkeys([FP32, search.choice.plan]))
    if context.settings.memory and context.left_s() > PEAKS_S:
        with journal.stage("memory"):
            measure_peaks(context, search.peaks, compared)
    with journal.stage("latency"):
        search.latencies = tuple(_latencies(search, found, compared))
    if found.arrived:
        journal.notes += arrival_notes(search)


def _not_hopeless(search: Search, plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans without those in low formats for which the device has no kernels, as the first plan of each format shows."""
    contest = search.contest
    first: dict[str, Plan] = {}
    for plan in plans:
        if plan.compute in LOW:
            first.setdefault(plan.compute, plan)
    contest.run(list(first.values()), 0)
    out = []
    for plan in plans:
        one = first.get(plan.compute, plan)
        slow = contest.entries[one].left if one != plan else None
        if slow is None or slow.kind != "worse":
            out.append(plan)
        else:
            reason = f"{in_words(one)}, in the same format, was {slow.reason}"
            search.journal.decide(plan, Fate("untried", reason, "race"))
    return out


# --- outputs ------------------------------------------------------------------------------------------------


def _badness(result: OutputParity) -> tuple[int, float]:
    """Return a key by which results are sorted: the worse the verdict, and then the larger the error."""
    return ("pass", "undecided", "fail").index(result.verdict), result.high


def _tested(search: Search, test: OutputTest, plan: Plan) -> OutputParity | None:
    """Test a plan's outputs; return None if the plan cannot run, and record why. On several ranks the worst result counts."""
    try:
        return search.context.ranks.at(f"the outputs of {plan}").worst(lambda: test.test(plan), _badness)
    except Exception as error:
        if not cannot_run(error):
            raise
        search.journal.decide(plan, Fate("failed", unfit(error)))
        return None


def _outputs(search: Search, found: Served, plan: Plan) -> OutputParity | None:
    """Test a plan's outputs on the batches of the search, once for all plans that compute the same outputs."""
    key = numerics_of(plan)
    if key not in search.outputs and (result := _tested(search, found.test, key)) is not None:
        search.outputs[key] = result
    return search.outputs.get(key)


def _find_sound(search: Search, found: Served, plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans whose outputs are as good as those of fp32, as given or with more modules in fp32."""
    contest, journal = search.contest, search.journal
    out: list[Plan] = []
    for plan in plans:
        if plan == FP32:
            out.append(plan)
            continue
        known = numerics_of(plan) in search.outputs
        if not known and (rival := in_vain(contest, plan, out)) is not None:
            journal.decide(plan, Fate("untried", f"not tested: {in_words(rival)} {AS_GOOD}"))
            continue
        journal.tell(in_words(plan))
        result = _outputs(search, found, plan)
        if result is not None and result.verdict == "pass":
            out.append(plan)
            continue
        journal.refuse(
            plan, result.reason if result is not None else journal.refusal(plan) or "it cannot run"
        )
        if result is not None and not out and (repaired := _repaired(search, found, plan)) is not None:
            out.append(repaired)
    return out or [FP32]


def _judge_as_given(search: Search, found: Served, plan: Plan) -> None:
    """Compare the outputs of the model in the formats in which it was given with those in fp32."""
    result = _outputs(search, found, plan)
    if result is not None and result.verdict != "pass":
        search.journal.decide(plan, Fate("unsound", result.reason))


def _repaired(search: Search, found: Served, plan: Plan) -> Plan | None:
    """Keep the modules in fp32 that cause most of the error, twice as many each time; None if half of them do not suffice."""
    blamed = search.context.ranks.at("the parts to keep in fp32").same(found.test.blame(plan, found.parts))
    order = [pattern for pattern, _ in blamed]
    count = 1
    while order and count <= max(1, len(found.parts) // 2):
        kept = order[:count]
        made = exempt(plan, found.parts, kept)
        result = _outputs(search, found, made)
        if result is not None and result.verdict == "pass":
            search.kept[numerics_of(made)] = dict.fromkeys(kept, "its rounding changes the outputs too much")
            return made
        if count >= len(order):
            return None
        count *= 2
    return None


def _choose(search: Search, found: Served, order: Iterable[Plan]) -> Choice:
    """Choose the first plan whose outputs pass on fresh batches, too."""
    for plan in order:
        if search.journal.refusal(plan):
            continue
        if numerics_of(plan) == FP32:
            return Choice(plan)
        with search.journal.stage("verification"):
            result = _evaluated(search, found, _tested(search, found.fresh(), numerics_of(plan)))
        if result is not None and result.verdict == "pass":
            search.verified = result
            return Choice(plan, kept=search.kept.get(numerics_of(plan), {}))
        why = result.reason if result is not None else search.journal.refusal(plan)
        search.journal.refuse(plan, f"on fresh batches: {why}")
    return Choice()


def _evaluated(search: Search, found: Served, result: OutputParity | None) -> OutputParity | None:
    """Add the metrics of the workload's ``evaluate`` to a result that passed, if there is time for it."""
    context = search.context
    evaluate = context.workload.evaluate
    if evaluate is None or result is None or result.verdict != "pass":
        return result
    with_metrics = functools.partial(found.test.with_metrics, result, evaluate, context.left_s())
    result = context.ranks.at("the metrics").worst(with_metrics, _badness)
    if not result.metrics:
        said = "evaluate was not compared: the time is too short to call it six times."
        context.journal.undecided.append(said)
    return result


# --- latency ------------------------------------------------------------------------------------------------


def _too_large(search: Search, found: Served, size: int | None) -> str:
    """Say that a batch of ``size`` samples does not fit into the free memory; empty if it does, or if that is unknown."""
    if size is None:
        return ""
    free = devices.free_bytes(search.context.device)
    activations = (search.peaks.get(FP32) or 0) - found.weight_bytes
    grows = max(activations, 2 * found.batch_bytes)  # at least its samples and itself
    needed = found.weight_bytes + grows * max(1.0, size / found.samples)
    if free is None or needed <= free:
        return ""
    return (
        f"Batch size {size} was not timed: by the peak of a batch of {found.samples} it needs about {amounts.size(needed)} of memory, "
        f"and {amounts.size(free)} are free."
    )


def _call(run: SeparateRun) -> list[float]:
    return [run.steps(1)]


def _latencies(search: Search, found: Served, plans: Sequence[Plan]) -> Iterator[Latency]:
    """Time single calls of plans and of one line of autocast at each batch size, in processes of their own that take turns."""
    context = search.context
    try:
        payload = context.payload()
    except NotThereError:  # the final has said so
        return
    sizes = context.settings.batch_sizes or (None,)
    calls = {str(plan): plan for plan in plans}
    if search.contest.entries.get(AUTOCAST, Entry(AUTOCAST)).rounds:
        calls[BY_AUTOCAST] = AUTOCAST
    for number, size in enumerate(sizes):
        room_s = min(CALLS_S, context.left_s() / (len(sizes) - number) / 2.0)
        if number and room_s <= 0.0:
            left = ", ".join(map(str, sizes[number:]))
            context.journal.undecided.append(
                f"Latencies at batch sizes {left} were not measured: the time ran out."
            )
            return
        ranks = context.ranks.at(f"calls with {size} samples")
        reason = ranks.worst(functools.partial(_too_large, search, found, size), bool)
        if reason:
            context.journal.undecided.append(reason)
            continue
        context.journal.tell("" if size is None else f"batch size {size}", number, len(sizes))
        with contextlib.ExitStack() as stack:
            runs: dict[str, SeparateRun] = {}
            try:
                for name, plan in calls.items():
                    kind = functools.partial(InferenceRun, batch_size=size, autocast=name == BY_AUTOCAST)
                    run = SeparateRun(
                        context.home, payload, plan, context.device, context.settings.seed, kind
                    )
                    stack.callback(run.close)
                    try:
                        ranks.every(functools.partial(run.warm_up, WARM + 2 * (plan.compile != "as_given")))
                    except Exception as error:
                        if name != BY_AUTOCAST or not cannot_run(error):  # which is only shown
                            raise
                    else:
                        runs[name] = run
                times: dict[str, list[float]] = {name: [] for name in runs}
                until, first = context.ranks.now() + room_s, times[str(FP32)]
                while len(first) < LEAST_CALLS or (len(first) < CALLS and context.ranks.now() < until):
                    for name, run in runs.items():
                        times[name] += ranks.slowest(functools.partial(_call, run))
            except Exception as error:
                if not cannot_run(error):
                    raise
                context.journal.notes.append(f"Batch size {size}: {unfit(error)}.")
                continue
        for name, own in times.items():
            p95_s = float(np.quantile(own, 0.95))
            yield Latency(name, size, statistics.median(own), p95_s, len(own))
