"""Write the answer of a search in words: what to do, how much faster that is, and why."""

from __future__ import annotations

from castwise.core.plans.formats import LOW
from castwise.core.plans.plan import Plan
from castwise.lab.parity.verdicts import LEAST
from castwise.lab.search.axes import AUTOCAST, FP32, complexity, numerics_of, run_with
from castwise.lab.search.decision import MARGIN
from castwise.lab.search.evidence import BY_AUTOCAST, Latency
from castwise.lab.search.pairs import in_training
from castwise.lab.search.state import Search
from castwise.lab.timing import stats

MOST_NAMED = 3
"""A sentence names at most this many regions or operators. If there are more, it names these and gives the total."""
UNKNOWN = 10.0
"""An interval is reported as unknown if its upper end is more than this many times its lower end."""
SLOWER = 1.05
"""A sentence calls a plan slower at a batch size if the median of its calls takes this many times as long as that of fp32."""
_SAME = 0.01
"""A sentence says "same memory" if the peak memory changes by less than this share."""


def answer(search: Search) -> str:
    """Return one sentence that says which plan to use and what is gained by it."""
    plan = search.choice.plan
    if search.context.settings.goal == "numerics":
        return _numerics(search)
    if plan == FP32:
        if not search.complete:
            return "Stay in fp32 for now: the search ended before it could choose."
        does = "Widen the model to fp32" if search.arrived else "Stay in fp32 as it is"
        return f"{does}: {_why_fp32(search)}."
    over = _over_fp32(search)
    if over and search.serves and search.arrived:
        over += " as the model in fp32"
    brings = [said for said in (over, _memory_words(search)) if said]
    does = advice(
        plan, search.begun.optimizer if search.begun is not None else "optimizer", serves=search.serves
    )
    if search.arrived:
        does = does.replace("Stay in fp32", "Widen the model to fp32")
    return f"{does}: {', '.join(brings) or 'neither speed nor memory was measured'}."


def why(search: Search) -> tuple[str, ...]:
    """Return the reasons for the answer, one sentence each."""
    goal, plan = search.context.settings.goal, search.choice.plan
    if plan == FP32 and not search.complete:
        return ()
    reasons = {
        "numerics": (_untested,),
        "inference": (_by_race, _same_outputs, _latency, _ties, _why_not_low),
    }
    usual = (_by_race, _against_autocast, _soundness, _untested, _ties, _why_not_low)
    chosen = reasons.get(goal, usual)
    return tuple(filter(None, (reason(search) for reason in chosen)))


def speed(search: Search, plan: Plan, over: Plan) -> stats.Ratio | None:
    """Return the speed of a plan relative to another plan in the final comparison; None if either did not finish it."""
    return search.final.ratio(plan, over) if search.final is not None else None


def advice(plan: Plan, optimizer: str = "optimizer", *, serves: bool = False) -> str:
    """Describe a plan as advice, for example ``Stay in fp32, switch to channels_last``.

    ``optimizer`` is the class name of the user's optimizer, and ``serves`` says whether the plan is for inference.
    """
    low = plan.compute
    if low == "fp32":
        does = ["Stay in fp32"]
    elif serves:
        whole = (
            ", with all weights and operators" if plan.rules == "none" else " by autocast, with cast weights"
        )
        does = [f"Serve in {low}{whole}"]
    elif plan.stores_low:
        does = [f"Train in {low} with {low} parameters and {'fp32' if plan.keeps_masters else 'no'} masters"]
    else:
        does = [f"Train in {low} by autocast"]
    inside: dict[str, list[str]] = {}
    for what, precision in (("products", plan.fp32_matmul), ("convolutions", plan.fp32_conv)):
        if precision not in ("as_is", "ieee"):
            inside.setdefault(precision, []).append(what)
    does += [
        f"let fp32 {' and '.join(what)} use {precision} internally" for precision, what in inside.items()
    ]
    for rule, said in (
        ("fp32", "keep {} in fp32"),
        ("unfused", "run {} unfused"),
        ("as_is", "leave {} uncast"),
    ):
        operators = [op for op, mine in plan.ops if mine == rule]
        if operators:
            does.append(said.format(_counted(operators, "operators")))
    for format in dict.fromkeys(region.compute for region in plan.regions if region.compute):
        patterns = [region.pattern for region in plan.regions if region.compute == format]
        does.append(f"keep {_counted(patterns, 'regions')} in {format}")
    switches = [plan.memory_format] if plan.memory_format != "as_is" else []
    if plan.optimizer == "fused":
        switches.append(f"the fused {optimizer}")
    if switches:
        does.append(f"switch to {' and '.join(switches)}")
    if plan.host_memory == "keep":
        does.append("keep freed host memory")
    if plan.compile != "as_given":
        does.append("compile the model" + (f" with mode {plan.compile}" if plan.compile != "default" else ""))
    return ", ".join(does)


def _counted(names: list[str], what: str) -> str:
    if len(names) <= MOST_NAMED:
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{len(names)} {what} ({', '.join(names[:MOST_NAMED])}, ...)"


def _speed_words(ratio: stats.Ratio | None) -> str:
    """Say how fast a plan is compared with another; if the interval includes 1, neither is called faster."""
    if ratio is None:
        return ""
    if ratio.high > UNKNOWN * ratio.low:
        return "at an unknown speed, since its times vary too much"
    interval = f"({ratio.low:.2f}-{ratio.high:.2f})"
    if round(ratio.low, 2) <= 1.0 <= round(ratio.high, 2):  # as printed
        return f"equally fast within the error {interval}"
    return f"{ratio.value:.2f} times as fast {interval}"


def _over_fp32(search: Search) -> str:
    """Say how fast the chosen plan is compared with fp32.

    A setting that was timed alone may save time that whole steps are too noisy to show. Then its separate saving is quoted too.
    """
    final, ratio = search.final, speed(search, search.choice.plan, FP32)
    said = _speed_words(ratio)
    if final is None or not final.to_choose or ratio is None or round(ratio.low, 2) > 1.0:
        return said
    if (
        run_with(FP32, search.choice.plan) != search.choice.plan
    ):  # the plans differ in more than those settings
        return said
    return f"timed alone, the change saves {100.0 * final.saves:.0f} % of a step; whole steps are {said}"


def _memory_words(search: Search) -> str:
    if search.choice.plan not in search.peaks or not search.peaks.get(FP32):
        return ""
    change = search.peaks[search.choice.plan] / search.peaks[FP32] - 1.0
    return (
        "same memory"
        if abs(change) < _SAME
        else f"{abs(change):.0%} {'less' if change < 0 else 'more'} memory".replace("%", " %")
    )


def _numerics(search: Search) -> str:
    low = search.context.settings.formats[0]
    if search.choice.plan == FP32:
        return f"{low} was not shown to be sound with any set of fp32 regions that was tried: stay in fp32."
    kept = [region.pattern for region in search.choice.plan.regions if region.compute == "fp32"]
    if not kept:
        return f"{low} needs no region in fp32: its gradients cannot be distinguished from fp32's within the noise of the data."
    return (
        f"{low} is sound with {len(kept)} region{'s' * (len(kept) != 1)} kept in fp32 ({', '.join(kept)}): its gradients "
        "then cannot be distinguished from fp32's within the noise of the data."
    )


def _timed(search: Search) -> list[Plan]:
    """Return the plans that were timed in the final comparison, without the chosen plan."""
    final = search.final
    return [] if final is None else [p for p in final.plans if p != search.choice.plan and final.seconds(p)]


def tied(search: Search) -> list[Plan]:
    """Return the plans with sound gradients that are not known to be slower than the chosen plan in the final comparison.

    Plans that are simpler than the chosen plan are left out: they were rejected because another plan is faster.
    """
    out = []
    for plan in _timed(search):
        ratio = speed(search, search.choice.plan, plan)
        weigh = search.final.complexity if search.final is not None else complexity
        simpler = weigh(plan) < weigh(search.choice.plan)  # rejected because another plan is faster
        if not simpler and _is_sound(search, plan) and ratio is not None and ratio.low <= 1.0:
            out.append(plan)
    return out


def _is_sound(search: Search, plan: Plan) -> bool:
    numerics = numerics_of(plan)
    found = (search.outputs if search.serves else search.parity).get(numerics)
    passed = numerics in (FP32, numerics_of(search.choice.plan)) or (
        found is not None and found.verdict == "pass"
    )
    return (passed or trains_like_fp32(search, plan)) and not search.journal.refusal(plan)


def trains_like_fp32(search: Search, plan: Plan) -> bool:
    """Whether training runs accepted a plan after the test of its gradients was undecided or failed by little."""
    trained = search.training.get(numerics_of(plan))
    return trained is not None and trained.verdict == "not worse"


def _why_fp32(search: Search) -> str:
    others = _timed(search)
    sound = [plan for plan in others if not search.journal.refusal(plan)]
    for_memory = search.context.settings.goal == "memory"
    if for_memory and not search.peaks.keys() - {FP32}:
        return "no other plan's peak memory was measured; use a longer --budget"
    if not others:
        return (
            "every other plan that was tried is slower"
            if _all_slower(search)
            else "no other plan was timed to the end"
        )
    if not sound:
        return "no other plan that was timed was shown to be sound"
    if for_memory:
        return "no sound plan has a smaller peak memory"
    ahead = [speed(search, plan, FP32) for plan in tied(search)]
    known = (
        "known"
        if all(ratio is None or round(ratio.low, 2) <= 1.0 for ratio in ahead)
        else "known with enough certainty"
    )
    return f"no sound plan is {known} to be faster" + (", and fp32 is the simplest" if ahead else "")


def _all_slower(search: Search) -> bool:
    """Whether every plan of the race other than fp32 was removed because it was slower.

    If no such plan raced, whether all plans were dropped as slower before the race.
    """
    entries = search.race.entries if search.race is not None else {}
    raced = [entry for plan, entry in entries.items() if plan != FP32]
    if not raced:
        left = {plan: fate.kind for plan, fate in search.journal.fates.items() if not fate.refused}
        return set(left.values()) == {"worse"} and any(plan.compute in LOW for plan in left)
    tried = [entry.left for entry in raced if entry.left is None or not entry.left.unknown]
    return bool(tried) and all(left is not None and left.kind == "worse" for left in tried)


def why_chosen(search: Search) -> str:
    """Return the reason for choosing the plan, as a clause."""
    if search.context.settings.goal == "memory" and search.peaks.keys() - {search.choice.plan}:
        return "the sound plan with the smallest peak memory"
    if search.context.settings.goal == "numerics":
        return "the plan with the fewest fp32 regions that passes"
    if not _timed(search):
        return (
            "every other plan that was tried is slower"
            if _all_slower(search)
            else "no other plan was timed to the end"
        )
    if _by_race(search):
        return "faster in the race; in the final no difference could be measured"
    if tied(search):
        among = search.final.to_choose if search.final is not None else ""
        return f"the simplest of the plans{among} that are as fast within the error"
    ratios = [speed(search, search.choice.plan, plan) for plan in _timed(search) if _is_sound(search, plan)]
    slower = all(ratio is not None and ratio.low > 1.0 for ratio in ratios)
    return "the fastest sound plan" if slower else "no sound plan is known to be faster"


def _by_race(search: Search) -> str:
    """Say how much faster the chosen plan was in the race, if the race decided because the final comparison could not."""
    ratio = speed(search, search.choice.plan, FP32)
    raced = search.final.behind.get((FP32, search.choice.plan)) if search.final is not None else None
    if raced is None or ratio is None or round(ratio.low, 2) > 1.0 or ratio.value <= MARGIN:
        return ""
    return f"In the race, where all plans trained in one process, it was {raced:.2f} times as fast as fp32."


def _against_autocast(search: Search) -> str:
    plan = search.choice.plan
    ratio = speed(search, plan, AUTOCAST)
    if plan == AUTOCAST:
        return "This is one-line torch.autocast in bf16."
    if ratio is not None and ratio.high <= UNKNOWN * ratio.low:
        return f"Compared with one-line torch.autocast in bf16 it is {_speed_words(ratio)}."
    return ""


def _soundness(search: Search) -> str:
    plan, trained, verified = search.choice.plan, search.choice.verification, search.choice.verified
    if plan.compute == "fp32" and plan.fp32_matmul in ("as_is", "ieee") and not plan.regions:
        return "It computes in fp32 throughout, so its gradients are fp32's."
    if verified is not None and verified.verdict != "pass" and trained is not None:
        return (
            f"The parity test was undecided ({verified.reason}; damage is the relative error of an update), so training runs decided: "
            f"{in_training(trained)}."
        )
    if verified is None or verified.verdict != "pass":
        return ""
    same = "Its gradients cannot be distinguished from fp32's within the noise of the data"
    if trained is None:
        return f"{same}."
    return f"{same}, and in training {in_training(trained)}."


_METRICS = 3
"""The largest number of metrics that the answer names."""


def _same_outputs(search: Search) -> str:
    """Say how good the chosen plan's outputs are, and what was not tested."""
    found = search.verified
    if found is None:
        return ""
    metrics = [f"{one.name} is {one.plan:.4g} ({one.fp32:.4g} in fp32)" for one in found.metrics[:_METRICS]]
    told = f" By the workload's evaluate, {'; '.join(metrics)}." if metrics else ""
    return f"On fresh batches its outputs are as good as fp32's: {found.reason}.{told}"


def _latency(search: Search) -> str:
    """Say how long single calls take under the chosen plan and in fp32, at each batch size."""
    times: dict[int | None, dict[str, Latency]] = {}
    for one in search.latencies:
        times.setdefault(one.batch_size, {})[one.plan] = one
    said = []
    for size, row in times.items():
        own, base = row.get(str(search.choice.plan)), row.get(str(FP32))
        if own is None or base is None or own is base:
            continue
        of = "" if size is None else f" of {size}"
        line = row.get(BY_AUTOCAST)
        auto = (
            ""
            if line is None
            else f", under one line of autocast {1e3 * line.median_s:.3g} and {1e3 * line.p95_s:.3g} ms"
        )
        slower = ", which is slower than fp32" if own.median_s > SLOWER * base.median_s else ""
        said.append(
            f"a batch{of} takes {1e3 * own.median_s:.3g} ms (95 % within {1e3 * own.p95_s:.3g} ms; in fp32 "
            f"{1e3 * base.median_s:.3g} and {1e3 * base.p95_s:.3g} ms{auto}){slower}"
        )
    return (
        f"Single calls, each after a pause of 10 ms as between requests: {'; '.join(said)}." if said else ""
    )


def _untested(search: Search) -> str:
    """Return a sentence about what the tests of the chosen plan did not cover; empty for fp32."""
    verified, trained = search.choice.verified, search.choice.verification
    if verified is None or search.begun is None:
        return ""
    after = max(search.warmed, trained.steps if trained is not None else 0)
    weights = (
        f"weights after more than {after} steps" if after else "weights after the first steps of training"
    )
    length = search.begun.test.prober.positions.length
    longer = [f"sequences longer than {length}"] if length else []
    seen = len(search.begun.test.prober.micros)
    rare = [f"kinds of batches rarer than 1 in {round(seen / 3)}"] if seen >= LEAST else []
    lower = ["learning rates below a tenth of the first"] if search.choice.plan.lacks_masters else []
    *first, last = [weights, *lower, *longer, *rare, "evaluation"]
    return f"Not tested: {', '.join(first)} and {last}."


def _ties(search: Search) -> str:
    count = len(tied(search))
    if not count:
        return ""
    return f"{count} other plan{'s are' if count > 1 else ' is'} as fast within the error; this one is the simplest."


def _autocast(search: Search) -> str:
    return "bf16 with cast weights" if search.serves else "One-line torch.autocast in bf16"


def _why_not_low(search: Search) -> str:
    """Say why one-line autocast was not chosen, if the chosen plan computes in fp32 and the reason is known."""
    if search.choice.plan.compute != "fp32":
        return ""
    fate, reason = search.journal.fate(AUTOCAST), search.journal.refusal(AUTOCAST)
    ratio = speed(search, AUTOCAST, search.choice.plan)
    if reason:
        fast = f" would be {_speed_words(ratio)}, but it" if ratio is not None and ratio.low > 1.0 else ""
        found = search.parity.get(AUTOCAST)
        keeps = (
            "was not shown to preserve"
            if found is not None and found.verdict == "undecided"
            else "does not preserve"
        )
        what = "outputs" if search.serves else "gradients"
        return f"{_autocast(search)}{fast} {keeps} the {what}: {reason}."
    if ratio is None and fate is not None:
        return f"{_autocast(search)} was rejected: {fate.reason}."
    return ""
