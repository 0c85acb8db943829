"""``doctor``, which measures a device's speed in each format, and finds what limits a workload on the device."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from castwise.commands.jobs import Event, Progress, heard
from castwise.commands.jobs.bench import bench
from castwise.commands.jobs.doctor_result import Bottleneck, DoctorResult, StepRate, WorkloadReport
from castwise.core.casting import default_device_type
from castwise.core.devices import features
from castwise.core.plans.plan import PRESETS
from castwise.core.session.process import find_device
from castwise.lab.timing.environment import environment
from castwise.lab.timing.limits import StepProfile, profile_steps
from castwise.lab.timing.matrix_units import matrix_units
from castwise.lab.timing.rates import (
    FormatGrade,
    Rate,
    grade_format,
    grade_of,
    measure_bandwidth,
    measure_rates,
    variants,
)
from castwise.lab.timing.timing import WARMUP
from castwise.lab.workloads.workload import Workload, find_workload, users_code

__all__ = ["Bottleneck", "DoctorResult", "WorkloadReport", "bottlenecks", "doctor", "grades"]

PLANS = ("fp32", "bf16-mixed", "fp16-mixed")
SLOW = 3.0
"""A plan is not timed further if its step, or the operators of its step, take this many times as long as in fp32."""
STARTS, ROUNDS = 3, 6
"""The number of processes in which each plan is timed, and the number of timing rounds per process."""
DATA = 0.1
"""Data loading counts as a bottleneck if it takes at least this share of the time of data loading and step together."""
DISPATCH = 0.3
"""Launching operators counts as a bottleneck if it takes at least this share of a step. Formats then matter little."""
OUTSIDE = 0.3
BUSY = 0.3
"""Other processes are reported as a disturbance if the load per CPU core is at least this number."""


def doctor(
    workload: Workload | str | None = None,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    small: bool = False,
    progress: Progress | bool | None = None,
) -> DoctorResult:
    """Measure the speed of a device in each format, and find what limits a workload on the device.

    Args:
        workload: A :class:`castwise.Workload`, or the name of a workload. None measures only the device.
        device: By default the available accelerator, else the CPU.
        seed: The seed of the workload's weights and data.
        small: Measure with small tensors, which takes about 1 s instead of 10 s and is less accurate.
        progress: True shows the command line's progress on standard error. A function is called with
            :class:`castwise.commands.jobs.Event` records.

    Returns:
        The result, with ``.table()`` and ``.to_json()``. The figures of the device are measured with single operators.
        The figures of the workload are measured with its training steps, in fp32 and under plain autocast.

    Raises:
        DeviceError: The device does not exist.
        WorkloadError: The workload cannot be found or does not train.
        NonFiniteError: The workload's first loss is not finite.
    """
    where = find_device("doctor", device, default_device_type())
    notes = _busy(where)  # measured before this process adds to the load
    found = find_workload(workload) if isinstance(workload, str) else workload
    with heard(progress) as tell:
        profile = None
        if found is not None:  # profile the workload first, so that a faulty one is reported at once
            tell(Event("workload", found.name, 0, 1))
            with users_code(f"workload {found.name!r} fails in fp32"):
                profile = profile_steps(found, where, seed=seed)
            tell(Event("workload", found.name, 1, 1))
        units = matrix_units(where)
        rates = measure_rates(
            where, small=small, on_kernel=lambda name, done, total: tell(Event("rates", name, done, total))
        )
        tell(Event("bandwidth", "copy", 0, 1))
        band = measure_bandwidth(where, copied_bytes=2**22 if small else 2**28)
        tell(Event("bandwidth", "copy", 1, 1))
        said = grades(rates, where.type)
        report = None
        if found is not None and profile is not None:
            with users_code(f"workload {found.name!r} failed"):
                steps = step_rates(
                    found, where, _not_run(profile, rates, where.type), seed, 1 if small else STARTS, tell
                )
            report = WorkloadReport(
                found.name, found.description, steps, profile, bottlenecks(profile, rates)
            )
    return DoctorResult(environment(where), units, features(where), rates, band, said, report, notes)


def _busy(device: torch.device) -> tuple[str, ...]:
    """Return a note if other processes use the CPU, which slows all formats and hides their differences."""
    if device.type != "cpu" or not hasattr(os, "getloadavg"):
        return ()
    return _load_note(os.getloadavg()[0], environment(device).cores)


def _load_note(load: float, cores: int) -> tuple[str, ...]:
    if load < BUSY * cores:
        return ()
    return (
        f"Other processes were computing (load {load:.1f} on {cores} cores), so rates are lower than on an idle machine, and a "
        f"faster format may appear no faster. Measure again when the machine is idle.",
    )


# --- formats ------------------------------------------------------------------------------------------------


def grades(rates: Sequence[Rate], device_type: str) -> tuple[FormatGrade, ...]:
    """Return a grade for each measured format except fp32. bf16 and fp16 get a grade even if the device cannot run them."""
    _, cannot = variants(device_type)
    names = dict.fromkeys(rate.format for rate in rates if rate.format != "fp32")
    lacks = [FormatGrade(v.name, "avoid", reason) for v, reason in cannot if v.dtype != torch.float32]
    return (*(grade_format(name, rates) for name in names), *lacks)


def _not_run(profile: StepProfile, rates: Sequence[Rate], device_type: str) -> dict[str, str]:
    """Return, for each plan under which the workload's step is not timed, the reason.

    The device lacks the plan's format, or runs the step's operators too slowly in the format.
    """
    _, cannot = variants(device_type)
    lacks = {variant.name: reason for variant, reason in cannot}
    out = {}
    for plan in PLANS[1:]:
        format = PRESETS[plan].compute
        slowdown = by_operators(profile, rates, plan)
        if format in lacks:
            out[plan] = lacks[format]
        elif slowdown > SLOW:
            out[plan] = f"not run: its operators alone would take {slowdown:.2g} times as long as in fp32"
    return out


def step_rates(
    workload: Workload, device: torch.device, out: Mapping[str, str], seed: int, starts: int, tell: Progress
) -> tuple[StepRate, ...]:
    """Time a workload's training steps under each of ``PLANS``, by :func:`castwise.bench`.

    ``out`` maps plans that are left out to the reasons.
    """
    rounds = starts * ROUNDS
    result = bench(
        workload, [plan for plan in PLANS if plan not in out], device=device, steps=WARMUP + rounds, rounds=rounds, starts=starts,
        seed=seed, inference=False, memory=False, hopeless=SLOW, progress=tell,
    )  # fmt: skip
    found = {plan: StepRate(plan, grade="avoid", reason=reason) for plan, reason in out.items()}
    for row in result.plans:
        if row.status != "ok" or row.training is None:
            found[row.name] = StepRate(row.name, grade="avoid", reason=row.reason)
        else:
            ratio = None if row.name == result.baseline else row.training.speedup
            grade = None if ratio is None else grade_of(ratio)
            found[row.name] = StepRate(row.name, row.training.step, ratio, grade)
    return tuple(found[plan] for plan in PLANS)


def by_operators(profile: StepProfile, rates: Sequence[Rate], plan: str) -> float:
    """Return a lower bound on the time of a step in a plan's format, relative to the time in fp32.

    The bound is computed from the measured rates of the step's matrix products and convolutions. Other operators, and those
    without a measured rate, count as in fp32. Of the confidence interval of a speedup, the upper end counts.
    """
    format = PRESETS[plan].compute
    best: dict[str, float] = {}
    for rate in rates:
        if rate.format == format and rate.speedup is not None:
            kind = {"matmul": "matmul", "depthwise": "depthwise"}.get(rate.kernel, "convolution")
            best[kind] = max(best.get(kind, 0.0), rate.speedup.high)
    return sum(operator.share / (best.get(operator.product) or 1.0) for operator in profile.operators)


# --- a workload ---------------------------------------------------------------------------------------------


def bottlenecks(profile: StepProfile, rates: Sequence[Rate]) -> tuple[Bottleneck, ...]:
    """Return what limits the speed of a workload's step, the most important first. The result is empty if nothing stands out.

    Args:
        profile: How the time of a step is spent.
        rates: The measured speed of the device's operators.
    """
    found = [_data(profile), _dispatch(profile), _outside(profile, rates)]
    return tuple(one for one in found if one is not None)


def _data(profile: StepProfile) -> Bottleneck | None:
    if profile.data_share < DATA:
        return None
    data_s, step_s = profile.data_s.median_s, profile.step_s.median_s
    return Bottleneck(
        "data",
        {"data_s": data_s, "step_s": step_s, "share": profile.data_share},
        "Prepare batches in other processes (torch.utils.data.DataLoader with num_workers) or prepare them once; no format "
        "makes data arrive sooner.",
        f"The step waits for data: a batch takes {data_s * 1e3:.3g} ms to arrive, the step itself {step_s * 1e3:.3g} ms "
        f"({profile.data_share:.0%} of the time is waiting).",
    )


def _dispatch(profile: StepProfile) -> Bottleneck | None:
    launches, advice = profile.launches, (
        "Use larger batches, torch.compile or a fused optimizer; a low format adds casts and gains little here."
    )  # fmt: skip
    each_s = profile.step_s.median_s / max(1.0, launches)
    measured = {"launches": launches, "step_s": profile.step_s.median_s, "time_per_operator_s": each_s}
    if profile.busy_share is not None:
        if profile.busy_share > 1.0 - DISPATCH:
            return None
        return Bottleneck(
            "dispatch",
            {**measured, "busy_share": profile.busy_share},
            advice,
            f"The device computes for {profile.busy_share:.0%} of a step; for the rest it waits for the host to launch "
            f"{launches:.0f} operators.",
        )
    if profile.launch_share < DISPATCH:
        return None
    return Bottleneck(
        "dispatch",
        {**measured, "launch_s": profile.launch_s, "share": profile.launch_share},
        advice,
        f"Operators are small: a step runs {launches:.0f}, on average {each_s * 1e6:.3g} us each, and launching one takes at "
        f"least {profile.launch_s * 1e6:.2g} us (all launches: at least {profile.launch_share:.0%} of the step).",
    )


def _outside(profile: StepProfile, rates: Sequence[Rate]) -> Bottleneck | None:
    share = profile.outside_share
    if share < OUTSIDE:
        return None
    by_name: dict[str, float] = defaultdict(float)
    for operator in profile.operators:
        if operator.kind != "matrix":
            by_name[operator.name.removeprefix("aten::")] += operator.share
    most = sorted(by_name.items(), key=lambda item: -item[1])[:3]
    measured: dict[str, float | int | str] = {"share": share, **{f"share of {k}": v for k, v in most}}
    bound = ""
    fast = [
        (r.speedup.value, r.format) for r in rates if r.kernel == "matmul" and r.grade == "fast" and r.speedup
    ]
    if fast:
        speedup, name = max(fast)
        limit = 1.0 / (share + (1.0 - share) / speedup)
        measured["most_from_faster_products"] = limit
        bound = f" Faster products alone ({name}, {speedup:.2g}x) could make the step at most {limit:.2f}x as fast."
    return Bottleneck(
        "outside matrix units",
        measured,
        "Memory traffic limits these operators: reduce it by activations in a low format, torch.compile, channels_last for "
        "convolutions and a fused optimizer.",
        f"{share:.0%} of the operators' time is outside of matrix products and convolutions "
        f"({', '.join(f'{name} {part:.0%}' for name, part in most)}).{bound}",
    )
