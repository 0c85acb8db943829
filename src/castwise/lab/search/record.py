"""Convert the results of a search to the dataclasses of :mod:`castwise.lab.search.evidence`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from castwise.core.model.resolve import assign, region_of
from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.lab.parity.parity import ParityResult
from castwise.lab.search.answer import answer, speed, tied, why, why_chosen
from castwise.lab.search.arrived import AS_GIVEN, widening_of
from castwise.lab.search.axes import AUTOCAST, FP32, name_of, numerics_of
from castwise.lab.search.compiling import pays_after
from castwise.lab.search.contest import Entry
from castwise.lab.search.evidence import (
    LINES,
    Candidate,
    Damage,
    Evidence,
    Histogram,
    RegionEvidence,
    Status,
)
from castwise.lab.search.fates import Fate
from castwise.lab.search.pairs import in_training
from castwise.lab.search.state import Search
from castwise.lab.serve.result import OutputParity
from castwise.lab.timing import stats
from castwise.lab.timing.environment import environment

LAST = 5
"""Number of steps over which a plan's reported loss is averaged."""
_PLACES: tuple[Status, ...] = ("chosen", "baseline", "sound", "tie", "rejected", "not tried")


def evidence(search: Search) -> Evidence:
    """Return the results of a search so far, whether it has ended or was interrupted."""
    asked, plan = dataclasses.asdict(search.context.settings), search.choice.plan
    asked["batch_sizes"] = list(asked["batch_sizes"])  # as JSON has it
    test = search.begun.test if search.begun is not None else None
    where = environment(search.context.device)
    return Evidence(
        workload=search.context.workload.name,
        description=search.context.workload.description,
        command=where.command,
        goal=asked.pop("goal"),
        formats=asked.pop("formats"),
        plan=str(plan),
        digest=plan.digest,
        compute=plan.compute,
        answer=answer(search),
        why=why(search),
        complete=search.complete,
        settings=asked,
        environment=where,
        world_size=search.context.ranks.size,
        candidates=_candidates(search),
        regions=_regions(search),
        histograms=_histograms(search),
        scale=test.range.scales() if test is not None and "fp16" in search.context.settings.formats else None,
        floor=test.floor if test is not None else None,
        repeat=test.repeat if test is not None else None,
        stages=tuple(search.journal.stages),
        lines=LINES if search.served is None else dict.fromkeys(LINES, search.served.test.line),
        verification=search.choice.verification,
        latencies=search.latencies,
        widen=widening_of(search),
        notes=tuple(dict.fromkeys(search.journal.notes)),
        undecided=tuple(dict.fromkeys(search.journal.undecided)),
    )


def _finding(search: Search, plan: Plan) -> ParityResult | OutputParity | None:
    """Return the known result of the test of a plan's gradients, or of its outputs if it is for inference.

    It is the result on fresh batches if there is one, else the result on the batches of the search.
    """
    if search.serves:
        fresh = search.verified if plan == search.choice.plan else None
        return fresh if fresh is not None else search.outputs.get(numerics_of(plan))
    verified = search.choice.verified if plan == search.choice.plan else None
    return verified if verified is not None else search.parity.get(numerics_of(plan))


def _candidates(search: Search) -> tuple[Candidate, ...]:
    entries = search.race.entries if search.race is not None else {}
    finalists = search.final.plans if search.final is not None else ()
    seen = [
        FP32,
        AUTOCAST,
        *finalists,
        *entries,
        *search.trials,
        *search.peaks,
        *search.journal.fates,
        *([] if search.as_given is None or search.race is None else [search.as_given]),
        search.choice.plan,
    ]
    rows = [_candidate(search, plan) for plan in dict.fromkeys(seen)]

    def rank(row: Candidate) -> tuple[int, float]:
        place = 0 if row.plan == str(search.choice.plan) else _PLACES.index(row.status)
        return place, -row.speedup.value if row.speedup is not None else 0.0

    return tuple(sorted(rows, key=rank))


def _candidate(search: Search, plan: Plan) -> Candidate:
    contest, final = search.race, search.final
    entry = contest.entries.get(plan, Entry(plan)) if contest is not None else Entry(plan)
    found = _finding(search, plan)
    status, fate = _standing(search, plan, entry, found)
    times, losses = (
        (final.seconds(plan), final.losses.get(plan, [])) if final is not None else (entry.lap.seconds, [])
    )
    over_fp32 = speed(search, plan, FP32)
    return Candidate(
        name=AS_GIVEN if plan == search.as_given else name_of(plan), plan=str(plan), status=status,
        words=AS_GIVEN if plan == search.as_given else in_words(plan), reason=fate.reason,
        stage=fate.stage, late=status == "not tried" and fate.kind == "late", rounds=len(times),
        time=_time(search, times, over_fp32), speedup=over_fp32,
        versus_autocast=speed(search, plan, AUTOCAST),
        peak_bytes=search.peaks.get(plan), parity=_parity(search, plan, found),
        loss=statistics.fmean(losses[-LAST:]) if losses else None,
        compile_s=(trial.compile_s or None) if (trial := search.trials.get(plan)) is not None else None,
        pays_after_steps=pays_after(search, plan),
    )  # fmt: skip


def _time(search: Search, times: Sequence[float], over_fp32: stats.Ratio | None) -> stats.Summary | None:
    """Return a plan's seconds per step, as fp32's median divided by the plan's speed relative to fp32.

    The plan's own times are not comparable with those of other plans, because not all plans ran in the same starts.
    """
    if not times:
        return None
    own, final = stats.summarise(times), search.final
    if over_fp32 is None or final is None:
        return own
    drift = statistics.median(final.seconds(FP32)) / over_fp32.value / own.median_s
    return stats.Summary(own.median_s * drift, own.q1_s * drift, own.q3_s * drift, own.n)


def _standing(
    search: Search, plan: Plan, entry: Entry, found: ParityResult | OutputParity | None
) -> tuple[Status, Fate]:
    """Return the status of a plan, and the reason for it."""
    final, noted = search.final, search.journal.fate(plan)
    if plan == search.choice.plan:
        return ("baseline" if plan == FP32 else "chosen"), Fate("spared", why_chosen(search))
    timed = final.fate(plan, search.choice.plan) if final is not None else None
    refused = noted if noted is not None and noted.refused else None
    fate = refused or _heavier(search, plan) or timed or noted or entry.left
    if plan == FP32 or plan in tied(search):
        return ("baseline" if plan == FP32 else "tie"), fate or Fate("spared", "")
    sound = found is not None and found.verdict == "pass"
    if fate is None and found is not None:
        unknown = (
            "its peak memory was not measured" if sound and search.context.settings.goal == "memory" else ""
        )
        return ("sound" if sound else "rejected"), Fate("untried", unknown)
    if fate is None:
        never = f"not timed to the end{_race_speed(search, plan)}" if entry.rounds else _not_asked(search)
        return "not tried", Fate("untried", never)
    ratio = speed(search, search.choice.plan, plan)
    if (
        fate is timed
        and found is None
        and numerics_of(plan) != FP32
        and ratio is not None
        and round(ratio.low, 2) <= 1.0
    ):
        what = "outputs" if search.serves else "gradients"
        untested = noted.reason if noted is not None else f"its {what} were not tested"
        return "not tried", Fate("untried", f"{untested}; in the final: {fate.reason}", fate.stage)
    if fate.unknown or (fate.kind == "spared" and found is None):
        return "not tried", fate
    return ("sound" if sound and fate.kind == "spared" else "rejected"), fate


def _heavier(search: Search, plan: Plan) -> Fate | None:
    """Return why a plan's peak memory counts against it, if memory is the goal."""
    peaks = search.peaks
    if search.context.settings.goal != "memory" or plan not in peaks or search.choice.plan not in peaks:
        return None
    more = peaks[plan] / peaks[search.choice.plan] - 1.0
    if more >= 0.01:
        return Fate("worse", f"takes {100.0 * more:.0f} % more memory", "memory")
    return Fate("worse", "takes as much memory, and is no simpler", "memory")


def _race_speed(search: Search, plan: Plan) -> str:
    """Say how fast a plan was in the race, without an interval, because only the final comparison gives intervals."""
    ratio = search.race.ratio(plan) if search.race is not None else None
    return f": about {ratio.value:.2f} times as fast as fp32 in the race" if ratio is not None else ""


def _not_asked(search: Search) -> str:
    low = AUTOCAST.compute
    if low not in search.context.settings.formats:
        return f"{low} is not among the formats that were asked for"
    if search.context.settings.goal == "numerics":
        return "the goal was not speed"
    return "the search ended before this plan"


def _parity(search: Search, plan: Plan, found: ParityResult | OutputParity | None) -> Damage | None:
    """Convert a parity result to a record with the plain damage and the verdict over all tests."""
    if found is None:
        return None
    if isinstance(found, OutputParity):
        return Damage(found.verdict, found.value, found.low, found.high, None, None, found.reason)
    d, trained = found.damage, search.training.get(numerics_of(plan))
    if plan == search.choice.plan:
        trained = search.choice.verification
    if found.verdict == "pass" or trained is None or trained.verdict != "not worse":
        return Damage(found.verdict, d.value, d.low, d.high, d.bias, d.noise, found.reason)
    reason = f"{found.reason}; {in_training(trained)}"
    return Damage("decided by training", d.value, d.low, d.high, d.bias, d.noise, reason)


def _regions(search: Search) -> tuple[RegionEvidence, ...]:
    if search.begun is None:
        return ()
    reference, plan = search.begun, search.choice.plan
    seen = reference.test.range
    low = (
        plan.compute
        if plan.compute != "fp32"
        else next((f for f in search.context.settings.formats if f != "fp32"), "bf16")
    )
    found = _finding(search, plan)
    shares = {region.path: region for region in found.regions} if isinstance(found, ParityResult) else {}
    assigned = assign(reference.test.prober.model, [r for r in plan.regions if r.compute is not None])
    out = []
    for part in reference.parts:
        cost = search.costs.get(part.pattern)
        alone = reference.numerics.alone.get(part.pattern)
        own = [shares[path] for path in part.paths if path in shares]
        bias, noise, data = (
            sum(getattr(share, name) for share in own) if own else None
            for name in ("bias", "noise", "data_noise")
        )
        histogram = seen.histogram(part.pattern, part.paths)
        region = region_of(part.paths[0], assigned)
        runs_in = (region.compute if region is not None else None) or plan.compute
        out.append(RegionEvidence(
            pattern=part.pattern, kind=part.kind, modules=len(part.paths), parameters=part.parameters,
            format=runs_in, reason=search.choice.kept.get(part.pattern) or _slower(search, part.pattern, runs_in, low),
            time_fp32_s=cost.times_s.get("fp32") if cost is not None else None,
            time_low_s=cost.times_s.get(low) if cost is not None else None,
            damage=None if alone is None else Damage(
                "pass" if alone.severity < 1.0 else "fail", alone.damage, None, None, None, None, alone.reason
            ),
            share=None if bias is None or noise is None else bias + noise, bias=bias, noise=noise, data_noise=data,
            grad_largest=max(seen.largest.get(path, 0.0) for path in part.paths) or None,
            grad_smallest=(histogram.smallest(0.001) or None) if histogram is not None else None,
        ))  # fmt: skip
    return tuple(out)


def _slower(search: Search, pattern: str, region: str, low: str) -> str:
    cost = search.costs.get(pattern)
    if cost is None or region != "fp32" or search.choice.plan.compute == "fp32":
        return ""
    if low in cost.reasons:
        return f"in {low} it {cost.reasons[low]}"
    if low in cost.times_s and cost.bordered_s.get(low, 0.0) > cost.times_s[low]:
        return f"all modules of its region together are faster in fp32 than in {low}"
    return f"faster in fp32, casts included, than in {low}"


def _histograms(search: Search) -> tuple[Histogram, ...]:
    if search.begun is None:
        return ()
    found = (search.begun.test.range.histogram(part.pattern, part.paths) for part in search.begun.parts)
    return tuple(h for h in found if h is not None and h.counts)
