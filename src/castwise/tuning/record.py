"""A search as evidence: turns what a :class:`~castwise.tuning.search.Search` holds into plain records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from castwise.measure import ranks, stats
from castwise.measure.environment import environment
from castwise.numerics.damage import ADAM_FAIL, ADAM_PASS, FAIL, PASS
from castwise.numerics.parity import ParityResult
from castwise.plans.plan import PRESETS, Plan
from castwise.resolve import assign
from castwise.tuning.axes import name_of, numerics_of
from castwise.tuning.evidence import Candidate, Damage, Evidence, Histogram, RegionEvidence
from castwise.tuning.search import Search

__all__ = ["answer", "evidence"]

FP32 = PRESETS["fp32"]
AUTOCAST = PRESETS["bf16-mixed"]
LAST = 5
"""Steps whose losses a candidate's loss is the mean of."""


def evidence(search: Search, command: str) -> Evidence:
    """All that a search has found so far.

    Args:
        search: Ended or interrupted.
        command: What repeats it.

    Returns:
        The record.
    """
    settings = search.settings
    scales = search.test.range.scales() if search.test is not None else None
    low = "fp16" in settings.formats
    return Evidence(
        workload=search.workload.name,
        description=search.workload.description,
        command=command,
        goal=settings.goal,
        formats=settings.formats,
        plan=str(search.chosen),
        digest=search.chosen.digest,
        answer=answer(search),
        complete=search.complete,
        settings={
            f.name: getattr(settings, f.name)
            for f in dataclasses.fields(settings)
            if f.name not in ("formats", "goal")
        },
        environment=environment(search.device, command),
        world_size=ranks.count(),
        candidates=_candidates(search),
        regions=_regions(search),
        histograms=_histograms(search),
        scale=scales if low else None,
        floor=_finite(search.test.floor) if search.test is not None else None,
        repeat=_finite(search.test.repeat) if search.test is not None else None,
        lines={"pass": PASS, "fail": FAIL, "adam_pass": ADAM_PASS, "adam_fail": ADAM_FAIL},
        stages=tuple(search.stages),
        verification=search.verification,
        notes=tuple(dict.fromkeys(search.notes)),
    )


def answer(search: Search) -> str:
    """The result in one sentence."""
    if not search.complete and search.chosen == FP32:
        return "The search ended before it could choose; fp32 is what is known to be sound."
    plan, contest = search.chosen, search.contest
    if search.settings.goal == "numerics":
        low = search.settings.formats[0]
        if plan == FP32:
            return f"No set of regions made {low} pass: stay with fp32."
        if not search.kept:
            return f"{low} needs no exemption: its gradients cannot be told from fp32's within the noise of the data."
        return (
            f"{low} is sound with {_count(len(search.kept), 'region')} kept in fp32 ({', '.join(search.kept)}): its gradients "
            "then cannot be told from fp32's within the noise of the data."
        )
    if plan == FP32:
        return f"Stay with fp32 as it is: {_why_fp32(search)}."
    parts = []
    over = contest.ratio(plan) if contest is not None else None
    if over is not None:
        parts.append(f"trains {_times(over)} as fast as fp32")
    beside = contest.ratio(plan, AUTOCAST) if contest is not None and plan != AUTOCAST else None
    if beside is not None:
        parts.append(f"{_times(beside)} as fast as one-line torch.autocast in bf16")
    if search.settings.goal == "memory" and plan in search.peaks and FP32 in search.peaks:
        parts.insert(0, f"takes {search.peaks[plan] / search.peaks[FP32]:.0%} of fp32's peak memory")
    trained = search.verification
    if search.verified is not None and search.verified.verdict != "pass" and trained is not None:
        return (
            f"{name_of(plan)} {' and '.join(parts)}. Its gradients differ from fp32's (damage, the relative "
            f"error of an update, {search.verified.damage.value:.2g}), and its training does not: over {trained.seeds} pairs of {trained.steps} "
            f"steps the loss differs by {trained.difference:.2g}, below {trained.upper:.2g} with 95 % confidence, where "
            f"{trained.margin:.2g} is what seeds alone do."
        )
    lossless = plan.compute == "fp32" and plan.fp32_matmul == "as_is" and not plan.regions
    sound = "computing in fp32 throughout" if lossless else (
        "with gradients that cannot be told from fp32's within the noise of the data"
    )  # fmt: skip
    return f"{name_of(plan)} {' and '.join(parts) or 'is sound'}, {sound}."


def _why_fp32(search: Search) -> str:
    unsound = [
        plan for plan in search.reasons if not search.reasons[plan].startswith(("not faster", "not tested"))
    ]
    if unsound:
        return f"nothing faster passed ({name_of(unsound[0])}: {search.reasons[unsound[0]]})"
    return "no plan was faster by more than the measurement can tell"


def _times(ratio: stats.Ratio) -> str:
    return f"{ratio.value:.2f} times ({ratio.low:.2f} to {ratio.high:.2f})"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def damage_record(result: ParityResult) -> Damage:
    """A finding as a record: of the plain damage, with the verdict over all that was asked."""
    d = result.damage
    return Damage(
        result.verdict,
        _finite(d.value),
        _finite(d.low),
        _finite(d.high),
        _finite(d.bias),
        _finite(d.noise),
        result.reason,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _candidates(search: Search) -> tuple[Candidate, ...]:
    contest = search.contest
    plans: list[Plan] = list(
        dict.fromkeys([FP32, *(contest.entries if contest else ()), *search.reasons, search.chosen])
    )
    rows = [_candidate(search, plan) for plan in plans]

    def rank(row: Candidate) -> tuple[int, float]:
        place = {"chosen": 0, "baseline": 1, "sound": 2, "rejected": 3}[row.status]
        if row.plan == str(search.chosen):
            place = 0
        return place, -(row.speedup.value if row.speedup is not None else 0.0)

    return tuple(sorted(rows, key=rank))


def _candidate(search: Search, plan: Plan) -> Candidate:
    contest = search.contest
    entry = contest.entries.get(plan) if contest is not None else None
    times = entry.seconds() if entry is not None else []
    found = search.verified if plan == search.chosen and search.verified is not None else None
    found = found or search.findings.get(plan) or search.findings.get(numerics_of(plan))
    reason = search.reasons.get(plan) or (entry.reason if entry is not None else "")
    if plan == search.chosen:
        status = "chosen" if plan != FP32 else "baseline"
        reason = "the fastest sound plan" if search.settings.goal == "time" else "chosen"
    elif plan == FP32:
        status = "baseline"
        reason = contest.reason(plan, search.chosen) if contest is not None else ""
    elif reason:
        status = "rejected"
    else:
        status = "sound" if found is not None and found.verdict == "pass" else "rejected"
        reason = contest.reason(plan, search.chosen) if contest is not None else ""
    losses = entry.losses[-LAST:] if entry is not None else []
    return Candidate(
        name=name_of(plan),
        plan=str(plan),
        status=status,  # type: ignore[arg-type]
        reason=reason,
        rounds=len(times),
        time=stats.summarise(times) if times else None,
        speedup=contest.ratio(plan) if contest is not None and times and plan != FP32 else None,
        versus_autocast=contest.ratio(plan, AUTOCAST)
        if contest is not None and times and plan != AUTOCAST
        else None,
        peak_bytes=search.peaks.get(plan),
        parity=damage_record(found) if found is not None else None,
        loss=_finite(sum(losses) / len(losses)) if losses else None,
    )


def _regions(search: Search) -> tuple[RegionEvidence, ...]:
    plan = search.chosen
    low = (
        plan.compute
        if plan.compute != "fp32"
        else next((f for f in search.settings.formats if f != "fp32"), "bf16")
    )
    found = search.verified or search.findings.get(numerics_of(plan))
    shares = {region.path: region for region in found.regions} if found is not None else {}
    out = []
    assigned = {}
    if search.test is not None and plan.regions:
        assigned = assign(search.test.prober.model, [r for r in plan.regions if r.compute is not None])
    for part in search.parts:
        cost = search.costs.get(part.pattern)
        alone = search.numerics.alone.get(part.pattern) if search.numerics is not None else None
        own = [shares[path] for path in part.paths if path in shares]
        bias, noise, data = (
            sum(getattr(r, name) for r in own) if own else None for name in ("bias", "noise", "data_noise")
        )
        seen = search.test.range.histogram(part.pattern, part.paths) if search.test is not None else None
        largest = (
            [search.test.range.largest.get(path, 0.0) for path in part.paths]
            if search.test is not None
            else []
        )
        region = _format_of(part.paths[0], assigned) or plan.compute
        share = None if bias is None or noise is None else _finite(bias + noise)
        out.append(RegionEvidence(
            pattern=part.pattern, kind=part.kind, modules=len(part.paths), parameters=part.parameters,
            format=region, reason=search.kept.get(part.pattern, "") or _slower(search, part.pattern, region, low),
            time_fp32_s=cost.times_s.get("fp32") if cost is not None else None,
            time_low_s=cost.times_s.get(low) if cost is not None else None,
            damage=None if alone is None else Damage(
                "pass" if alone.severity < 1.0 else "fail", _finite(alone.damage), None, None, None, None, alone.reason
            ),
            share=share, bias=_finite(bias), noise=_finite(noise), data_noise=_finite(data),
            grad_largest=_finite(max(largest, default=0.0)) or None,
            grad_smallest=seen.smallest(0.001) or None if seen is not None else None,
        ))  # fmt: skip
    return tuple(out)


def _format_of(path: str, assigned: Mapping[str, object]) -> str | None:
    while True:
        if path in assigned:
            return str(getattr(assigned[path], "compute", None))
        if not path:
            return None
        path = path.rpartition(".")[0]


def _slower(search: Search, pattern: str, region: str, low: str) -> str:
    cost = search.costs.get(pattern)
    if cost is None or region != "fp32" or search.chosen.compute == "fp32":
        return ""
    if low in cost.reasons:
        return f"in {low} it {cost.reasons[low]}"
    return f"faster in fp32, casts included, than in {low}"


def _histograms(search: Search) -> tuple[Histogram, ...]:
    if search.test is None:
        return ()
    found = (search.test.range.histogram(part.pattern, part.paths) for part in search.parts)
    return tuple(h for h in found if h is not None and h.counts)
