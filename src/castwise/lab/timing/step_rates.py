"""How fast a training step of a workload is in each low format, beside fp32.

Each plan trains in a process of its own, in turns, and all are started again: what the rates of single operators promise
is not what a step makes of them (:mod:`castwise.lab.timing.apart`). Intervals hold the spread between starts, as a search's do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from castwise.core.plans.plan import PRESETS
from castwise.lab.timing import stats
from castwise.lab.timing.apart import Apart, Timed, race_apart
from castwise.lab.timing.failures import cannot_run, unfit
from castwise.lab.timing.limits import StepProfile
from castwise.lab.timing.processes import Home, NotThereError, delivered, not_there
from castwise.lab.timing.rates import Rate, Verdict, verdict_of
from castwise.lab.timing.steps import TrainingRun
from castwise.lab.timing.timing import race
from castwise.lab.workloads.workload import Workload

PLANS = ("fp32", "bf16-mixed", "fp16-mixed")
SLOW = 3.0
"""A plan that takes this many times fp32's time, by a step or by what its operators take, is not timed any further."""
TRIED, SURE_S = 5, 1.0
"""So many steps, or so many seconds of them, have to say that."""
STARTS, ROUNDS = 3, 6
BUDGET_S = 12.0
"""No start begins after so long, and no round but the first three of a start."""


@dataclass(frozen=True)
class StepRate:
    """A training step under a plan.

    Attributes:
        plan: A preset's name.
        time: Per step, None where it was not timed to the end.
        speedup: Over fp32; None for fp32, and where it was not timed to the end.
        verdict: None for fp32.
        reason: Why it was not timed to the end; else empty.
    """

    plan: str
    time: stats.Summary | None = None
    speedup: stats.Ratio | None = None
    verdict: Verdict | None = None
    reason: str = ""


def measure_steps(
    workload: Workload,
    device: torch.device,
    out: Mapping[str, str],
    *,
    seed: int = 0,
    starts: int = STARTS,
    on_start: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[StepRate, ...]:
    """Time steps under each of ``PLANS``.

    Args:
        workload: What is trained; one that cannot run in another process is timed in this one.
        device: Where.
        out: By plan why it is not run.
        seed: Of weights and data.
        starts: How often all are started, within some seconds.
        on_start: Called with the number of starts that are done, and how many there are at most.

    Returns:
        By plan what was found, fp32's first.

    Raises:
        Exception: What fp32 raised here, or another plan, unless it says that the plan cannot run.
    """
    why = dict(out)
    plans = [plan for plan in PLANS if plan not in why]
    times: dict[str, list[list[float]]] = {plan: [] for plan in plans}
    with Home() as home:
        try:
            payload = delivered(home, workload)
            plans = _tried(home, workload, payload, plans, device, seed, why)
        except NotThereError:
            why = dict(out)
            times, failed = _in_turns(workload, plans, device, seed)
            why |= failed
            plans = [plan for plan in plans if plan not in why]
        else:
            end = time.monotonic() + BUDGET_S
            for start in range(starts):
                on_start(start, starts)
                found = race_apart(
                    home, payload, [PRESETS[plan] for plan in plans], device, rounds=ROUNDS,
                    first=start * ROUNDS, seed=seed, until=end,
                )  # fmt: skip
                plans = _booked(plans, found, times, why)
                if time.monotonic() > end:
                    break
            on_start(starts, starts)
    ratios = stats.restarts([times[plan] for plan in plans])
    rates = {}
    for number, plan in enumerate(plans):
        summary = stats.summarise([second for start in times[plan] for second in start])
        ratio = ratios[0, number] if number else None
        rates[plan] = StepRate(plan, summary, ratio, verdict_of(ratio) if ratio is not None else None)
    return tuple(rates.get(plan) or StepRate(plan, verdict="avoid", reason=why[plan]) for plan in PLANS)


def _tried(
    home: Home, workload: Workload, payload: bytes, plans: Sequence[str], device: torch.device, seed: int,
    why: dict[str, str],
) -> list[str]:  # fmt: skip
    """The plans whose second step is not hopelessly slow; the first builds kernels."""
    left, base_s = [], 0.0
    for plan in plans:
        with contextlib.closing(Apart(home, payload, PRESETS[plan], device, seed)) as run:
            try:
                run.wait()
                run.steps(1)
                step_s = _least_s(run, SLOW * base_s)
            except Exception as error:
                if plan == "fp32":
                    raise not_there(workload, error) from error
                why[plan] = _reason(plan, error)
                continue
        base_s = base_s or step_s
        if step_s > SLOW * base_s:
            why[plan] = f"stopped: a step takes {step_s / base_s:.3g} times as long as in fp32"
        else:
            left.append(plan)
    return left


def _least_s(run: Apart, limit_s: float) -> float:
    """The least of some steps, of which one below the limit is the last: a busy neighbour makes one long, hardly all."""
    taken = [run.steps(1)]
    while min(taken) > limit_s and len(taken) < TRIED and sum(taken) < SURE_S:
        taken.append(run.steps(1))
    return min(taken)


def _reason(plan: str, error: Exception) -> str:
    """Why a plan is not timed; what fp32 raises, and a fault of the code that ran, is raised."""
    if plan == "fp32" or not cannot_run(error):
        raise error
    return unfit(error)


def _booked(
    plans: Sequence[str], found: Sequence[Timed], times: dict[str, list[list[float]]], why: dict[str, str]
) -> list[str]:
    for plan, timed in zip(plans, found, strict=True):
        if timed.error is None:
            times[plan].append(timed.times_s)
        else:
            why[plan] = _reason(plan, timed.error)
    return [plan for plan in plans if plan not in why]


def _in_turns(
    workload: Workload, plans: Sequence[str], device: torch.device, seed: int
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """One start of all plans in this process, and why plans did not come to its end."""
    times: dict[str, list[list[float]]] = {}
    why: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        runs = []
        for plan in plans:
            try:
                run = TrainingRun(workload, PRESETS[plan], device, seed)
            except Exception as error:
                why[plan] = _reason(plan, error)
                continue
            stack.callback(run.close)
            runs.append((plan, run))
        laps = race(runs, rounds=ROUNDS, steps=1, device=device, hopeless=SLOW)
        for plan, _ in runs:
            lap = laps[plan]
            if lap.error is not None:
                why[plan] = _reason(plan, lap.error)
            elif lap.slowdown is not None:
                why[plan] = f"stopped: a step takes {lap.slowdown:.3g} times as long as in fp32"
            else:
                times[plan] = [lap.seconds]
    return times, why


def by_operators(profile: StepProfile, rates: Sequence[Rate], plan: str) -> float:
    """How many times as long as in fp32 a step takes in a plan's format at least, by the rates of its operators.

    What is neither a matrix product nor a convolution counts as in fp32, and so does what has no rate; of an interval the
    high end counts.
    """
    format = PRESETS[plan].compute
    best: dict[str, float] = {}
    for rate in rates:
        if rate.format == format and rate.speedup is not None:
            kind = {"matmul": "matmul", "depthwise": "depthwise"}.get(rate.kernel, "convolution")
            best[kind] = max(best.get(kind, 0.0), rate.speedup.high)
    slowdown = 0.0
    for operator in profile.operators:
        slowdown += operator.share / (best.get(operator.product) or 1.0)
    return slowdown
