"""Whether a plan can be compiled: one trial, in the current process.

A compiled model may be silently wrong (pytorch issues 179804, 194329: a backward that omits a block in fp32, garbage after a
shape change under autocast). The trial therefore compares its gradients with those of the same plan in eager mode, at the same
weights, batches and random draws. The tolerance is the uncertainty of the format: how much the gradients move when each weight
moves by one unit in the format's last place.

One random move of the weights is enough in a low format. In fp32 it may miss rare events: a ReLU whose input is within rounding
of zero flips in one draw of sixteen, but in most runs of compiled code, which rounds activations differently. A flip moves the
gradients before it a thousand times as far as a draw without flips (ResNet, 7e-3 and 1e-6). If the gradients differ by more
than the tolerance, the trial therefore moves the weights further, several times, until the whole gradient has once jumped about
as far as the parameter's gradient differs.

Some gradients are only rounding error, for example that of a bias before a BatchNorm, which is zero in exact arithmetic. A unit
in the last place moves such a gradient by its full size, and kernels that round differently make it 90 times as large (bf16 and
channels_last on a CPU). It carries no signal; its difference only has to be small relative to the gradient of the whole model.

The trial does not compare with fp32 at first, because the plan's numerics have been tested before, with methods that need eager
code. It uses fp32 when the gradients differ by more than the tolerance: the eager kernels may be the less accurate ones, and a
compiled gradient that is closer to fp32 is no fault. Over 4,096 rows a layer norm's backward in bf16 on a CPU is off by 7 % in
eager mode and by 0.2 % compiled (bench/results/compare-causes-cpu.json).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from castwise.core import _torch
from castwise.core.casting.trees import to_device
from castwise.core.plans.formats import FORMATS
from castwise.core.plans.plan import Plan
from castwise.errors import sentence
from castwise.lab.parity.probes import REFERENCE, as_real, dithered
from castwise.lab.passes.passes import gradients_of, run_backward
from castwise.lab.timing.processes import received
from castwise.lab.timing.runners import TrainingRun
from castwise.lab.timing.served import belong_to
from castwise.lab.timing.stats import Ratio
from castwise.lab.timing.timing import race, speedup
from castwise.lab.workloads.workload import Workload

BATCHES = 3
"""Batches on which gradients are compared; with ``STEPS`` they stay below the number of compilations at which Dynamo gives up
silently."""
STEPS, SETTLED = 4, 2
"""Steps that are watched for compilations, and how many of the last must have none."""
TIMED, BLOCK_S = 5, 0.1
FACTOR = 25.0
"""A squared difference may be this many times the one that moving each weight by a unit in the last place causes."""
MOST, SURE = 0.25, 4.0
"""It may be at most ``MOST`` of the gradient's squared norm or ``SURE`` times the difference that this move causes,
whichever is more: an omitted gradient differs by its whole norm, and five units in the last place of bf16 can move a gradient
through twenty layers by as much."""
JUMPS, DRAWS, SHARE = 4.0, 24, 0.5
"""In fp32 the relative difference may also be ``JUMPS`` times that of the whole gradient's largest jump in ``DRAWS`` draws,
which move weights by the root of ``FACTOR`` units; the draws may take ``SHARE`` of the compile time."""
NOISE = {"fp32": 0.01, "tf32": 0.5, "bf16": 0.5, "fp16": 0.5}
"""A gradient has no signal if a unit in the last place moves it by at least this share of its squared norm. Observed moves: in
fp32 at most 1 % of the norm for signals and 18 % for noise, in bf16 56 % and 100 %."""
NEAR = 0.25
"""fp32 may decide which of two gradients is better if the eager gradient's squared relative error is at most this."""
LEAST = {"fp32": 1e-6, "tf32": 1e-3, "bf16": 1e-3, "fp16": 1e-3}
"""Squared relative difference of a parameter's gradient that is always accepted, by the plan's coarsest format; relative to the
gradient of the whole model if the parameter's own has no signal."""


@dataclass(frozen=True)
class CompileTrial:
    """Result of a trial.

    Attributes:
        reason: Why the plan is not compiled; empty if it can be.
        compile_s: Seconds that compiling took with an empty cache on disk.
        eager_s: Seconds per step in eager mode.
        gain: How many times as fast the compiled plan is; None if it was not timed.
        difference: The largest ratio of a gradient's difference to its tolerance.
        late: Whether it is not compiled because too little time was left.
    """

    reason: str = ""
    compile_s: float = 0.0
    eager_s: float = math.nan
    gain: Ratio | None = None
    difference: float = 0.0
    late: bool = False

    @property
    def step_s(self) -> float:
        """Seconds per compiled step."""
        return self.eager_s / self.gain.value if self.gain is not None else math.nan


def run_trial(_pipe: Connection, workload: bytes, line: str, device: str, seed: int) -> CompileTrial:
    """Try a compiled plan; :class:`castwise.lab.timing.processes.Home` calls this in a new process."""
    plan = Plan.from_json(line)
    belong_to(plan)
    return try_compiled(received(workload), plan, torch.device(device), seed)


def try_compiled(workload: Workload, plan: Plan, device: torch.device, seed: int) -> CompileTrial:
    """Compile a plan, and compare its gradients and step times with those of the same plan in eager mode.

    It changes process-wide settings of the compiler, so the process should do nothing else.
    """
    _torch.dynamo.refuse_to_give_up()
    eager = TrainingRun(workload, dataclasses.replace(plan, compile="as_given"), device, seed)
    batches = iter(workload.batches(seed))
    data = [to_device(next(batches), device) for _ in range(BATCHES)]
    first = _gradients(eager, workload, data[0], 0)
    draws = _differs(first, _gradients(eager, workload, data[0], 1))
    try:
        with _torch.dynamo.eager_random_numbers() if draws else contextlib.nullcontext():
            compiled = TrainingRun(workload, plan, device, seed)
            worst, where = _difference(eager, compiled, workload, plan, data, device)
        if compiled.compilations == 0:
            return CompileTrial("not compiled: torch.compile finds nothing to compile in the model")
        if math.isnan(worst):
            return CompileTrial(
                "not compiled: its gradients at its first loss scale are not finite, so they could not be compared",
                compiled.compile_s,
            )
        if worst > 1.0:
            return CompileTrial(
                f"not compiled: the gradient of {where} differs from that of the uncompiled plan by {math.sqrt(worst):.1f} times the "
                "tolerance for its format",
                compiled.compile_s, difference=worst,
            )  # fmt: skip
        if draws:  # the compared code is not the code that will run
            compiled.close()
            torch.compiler.reset()
            compiled = TrainingRun(workload, plan, device, seed)
        counts = []
        for _ in range(STEPS):
            compiled.block(1)
            counts.append(compiled.compilations)
        if counts[-1] > counts[-1 - SETTLED]:
            return CompileTrial(
                "not compiled: it recompiles at every step", compiled.compile_s, difference=worst
            )
        eager_s, gain = _timed(eager, compiled, device)
    except Exception as error:
        if _torch.dynamo.gave_up(error):
            return CompileTrial(
                "not compiled: it recompiles too often, for example for batches of different shapes"
            )
        return CompileTrial(
            f"does not compile: {sentence(getattr(error, 'inner_exception', error), whole=False)}"
        )
    return CompileTrial("", compiled.compile_s, eager_s, gain, worst)


@contextlib.contextmanager
def _in_force(run: TrainingRun) -> Iterator[None]:
    try:
        run.before(0)
        yield
    finally:
        run.after()


@contextlib.contextmanager
def _buffers_stay(model: torch.nn.Module) -> Iterator[None]:
    """Restore running statistics, power iterations and counters, so that every pass starts with the same buffers."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in kept:
                setattr(module, name, buffer)
                if not _torch.tensors.is_dense(buffer) or not torch.equal(buffer, values):
                    buffer.copy_(values)


def _gradients(run: TrainingRun, workload: Workload, batch: Any, seed: int) -> dict[str, Tensor]:
    """Unscaled gradients of one batch, by parameter; takes no step and changes no buffer."""
    with _in_force(run), _buffers_stay(run.model):
        run.model.zero_grad(set_to_none=True)
        run_backward(run.amp, run.model, workload.loss, batch, f"workload {workload.name!r}", seed)
        found = {
            name: as_real(gradient).float()
            for name, gradient in gradients_of(run.model, run.amp.get_scale()).items()
        }
        run.optimizer.zero_grad()
    return found


def _differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(one[name], other[name]) for name in one.keys() & other.keys())


def _difference(
    eager: TrainingRun,
    compiled: TrainingRun,
    workload: Workload,
    plan: Plan,
    data: Sequence[Any],
    device: torch.device,
) -> tuple[float, str]:
    """The largest ratio of a squared gradient difference to its tolerance, and its parameter; NaN if none is finite."""
    coarsest = next((name for name in ("bf16", "fp16") if name in plan.formats), "fp32")
    if coarsest == "fp32" and plan.fp32_matmul in FORMATS:
        coarsest = plan.fp32_matmul
    eps = FORMATS[coarsest].eps
    signal: dict[str, float] = {}
    moved: dict[str, float] = {}
    error: dict[str, float] = {}
    for seed, batch in enumerate(data):
        want = _gradients(eager, workload, batch, seed)
        with _moved(eager.model, eps, seed):
            near = _gradients(eager, workload, batch, seed)
        got = _gradients(compiled, workload, batch, seed)
        for name, mine in want.items():
            beside = [
                other.get(name, torch.zeros_like(mine)) for other in (near, got)
            ]  # a missing gradient counts as zero
            if not all(bool(torch.isfinite(one).all()) for one in (mine, beside[0])):
                continue  # a loss scale that is too high, or just at the limit: nothing to compare
            for found, one in zip((moved, error), beside, strict=True):
                d = float((one - mine).double().square().sum())
                found[name] = found.get(name, 0.0) + (d if math.isfinite(d) else math.inf)
            signal[name] = signal.get(name, 0.0) + float(mine.double().square().sum())
    if not signal:
        return math.nan, ""
    over = _over(signal, moved, error, coarsest)
    if max(over.values(), default=0.0) > 1.0:
        if coarsest in ("bf16", "fp16"):
            nearer = _nearer(eager, compiled, workload, data, device)
            over = {name: value for name, value in over.items() if value <= 1.0 or name not in nearer}
        elif coarsest == "fp32":
            until = time.monotonic() + SHARE * compiled.compile_s
            for jump in _jumps(eager, workload, data, eps):
                over = _over(signal, moved, error, coarsest, jump)
                if max(over.values()) <= 1.0 or time.monotonic() > until:
                    break
    worst = max(over, key=over.__getitem__, default="")
    return over.get(worst, 0.0), worst


def _over(
    signal: Mapping[str, float],
    moved: Mapping[str, float],
    error: Mapping[str, float],
    coarsest: str,
    jump: float = 0.0,
) -> dict[str, float]:
    """Ratio of each parameter's squared difference to its tolerance."""
    whole, least = sum(signal.values()), LEAST[coarsest]
    over = {}
    for name, mine in signal.items():
        move = moved[name]
        noise = move > 0.0 and move >= NOISE[coarsest] * mine
        if noise:
            allowed = FACTOR * move + least * whole
        else:
            allowed = min(FACTOR * move, max(MOST * mine, SURE * move)) + (least + JUMPS * jump) * mine
        over[name] = error[name] / allowed if allowed else error[name] and math.inf
    return over


def _jumps(eager: TrainingRun, workload: Workload, data: Sequence[Any], eps: float) -> Iterator[float]:
    """The largest jump so far after each draw: a squared move of a batch's whole gradient over its squared norm."""
    wants = [_gradients(eager, workload, batch, seed) for seed, batch in enumerate(data)]
    norms = [sum(float(mine.square().sum()) for mine in want.values()) for want in wants]
    largest = 0.0
    for draw in range(1, 1 + DRAWS):
        for seed, (batch, want, norm) in enumerate(zip(data, wants, norms, strict=True)):
            with _moved(eager.model, math.sqrt(FACTOR) * eps, draw * len(data) + seed):
                near = _gradients(eager, workload, batch, seed)
            move = sum(
                float((near[name] - mine).square().sum()) for name, mine in want.items() if name in near
            )
            if math.isfinite(move) and norm:
                largest = max(largest, move / norm)
        yield largest


def _nearer(
    eager: TrainingRun, compiled: TrainingRun, workload: Workload, data: Sequence[Any], device: torch.device
) -> set[str]:
    """Parameters whose compiled gradients are no further from fp32's than the eager ones, if those are accurate."""
    signal: dict[str, float] = {}
    errors: dict[str, list[float]] = {}
    with contextlib.closing(TrainingRun(workload, REFERENCE, device, 0)) as reference:
        reference.model.load_state_dict(eager.amp.model_state_dict(eager.model))
        for seed, batch in enumerate(data):
            right = _gradients(reference, workload, batch, seed)
            found = [_gradients(run, workload, batch, seed) for run in (eager, compiled)]
            for name in right.keys() & found[0].keys() & found[1].keys():
                signal[name] = signal.get(name, 0.0) + float(right[name].square().sum())
                mine = errors.setdefault(name, [0.0, 0.0])
                for at, other in enumerate(found):
                    mine[at] += float((other[name] - right[name]).square().sum())
    return {name for name, (one, other) in errors.items() if other <= one <= NEAR * signal[name]}


@contextlib.contextmanager
def _moved(model: torch.nn.Module, eps: float, seed: int) -> Iterator[None]:
    """Move weights at random by up to a unit in a format's last place; restore them at the end."""
    kept = {p: p.detach().clone() for p in model.parameters() if p.is_floating_point() or p.is_complex()}
    try:
        with torch.no_grad():
            for p, weight in kept.items():
                generator = torch.Generator(p.device).manual_seed(seed + 1)
                p.data.copy_(dithered(weight if weight.is_complex() else weight.float(), 2 * eps, generator))
        yield
    finally:
        for p, weight in kept.items():
            p.data.copy_(weight)


def _timed(eager: TrainingRun, compiled: TrainingRun, device: torch.device) -> tuple[float, Ratio | None]:
    """Median seconds per step of the first, and how many times as fast the second is."""
    laps = race(
        [("eager", eager), ("compiled", compiled)], rounds=TIMED, device=device, hopeless=math.inf,
        steps=lambda step_s: dict.fromkeys(step_s, max(1, min(64, round(BLOCK_S / min(step_s.values()))))),
    )  # fmt: skip
    for lap in laps.values():
        lap.checked()
    return statistics.median(laps["eager"].seconds), speedup(laps["eager"], laps["compiled"])
