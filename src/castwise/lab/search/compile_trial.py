"""Test in the current process whether compiling a plan gives correct gradients, or outputs, and faster steps.

Outputs of a model that is served are tested against fp32, like those of uncompiled plans. The rest is about training.

A compiled model may be silently wrong. Known cases are a backward that omits a block in fp32 (pytorch issue 179804), and
garbage after a shape change under autocast (194329). The trial therefore compares compiled gradients with those of the same
plan in eager mode, at the same weights, batches and random draws. The tolerance is the uncertainty of the format: how much the
gradients move when each weight moves by one unit in the format's last place.

In a low format one random move of the weights is enough. In fp32 one move may miss rare events, such as a ReLU whose input is
within rounding of zero. Its output flips in one random move of sixteen, but in most runs of compiled code, which rounds
activations differently. A flip moves the gradients of earlier layers a thousand times as far as a move without flips (ResNet,
7e-3 and 1e-6). If the gradients differ by more than the tolerance, the trial therefore moves the weights further, several
times. It stops once the whole gradient has jumped about as far as the parameter's gradient differs.

Some gradients are only rounding error. An example is the gradient of a bias before a BatchNorm, which is zero in exact
arithmetic. A unit in the last place moves such a gradient by its full size, and kernels that round differently make it 90 times
as large (bf16 and channels_last on a CPU). Such a gradient carries no signal. It is only required that its difference is small
relative to the gradient of the whole model.

The trial does not compare with fp32 at first, because the plan's numerics were tested before, with methods that need eager
code. It compares with fp32 when the gradients differ by more than the tolerance: the eager kernels may be the less accurate
ones, and a compiled gradient that is closer to fp32 is no fault. Over 4,096 rows, the backward of a layer norm in bf16 on a CPU
is off by 7 % in eager mode and by 0.2 % compiled (bench/results/compare-causes-cpu.json).
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
from castwise.core.devices import in_fp64
from castwise.core.plans.formats import FORMATS
from castwise.core.plans.plan import Plan
from castwise.errors import sentence
from castwise.lab.parity.batches import epochs_of
from castwise.lab.parity.probes import REFERENCE, as_real, dithered
from castwise.lab.passes.passes import gradients_of, run_backward
from castwise.lab.search.axes import uncompiled
from castwise.lab.serve.comparison import output_test
from castwise.lab.timing.apart import Kind
from castwise.lab.timing.processes import received
from castwise.lab.timing.runners import InferenceRun, TrainingRun, build_model
from castwise.lab.timing.served import belong_to
from castwise.lab.timing.stats import Ratio
from castwise.lab.timing.timing import race, speedup
from castwise.lab.workloads.workload import Workload

NOTHING = "not compiled: torch.compile finds nothing to compile in the model"
BATCHES = 3
"""Number of batches on which gradients are compared. Dynamo silently stops compiling after a number of compilations;
``BATCHES`` and ``STEPS`` together stay below it."""
STEPS, SETTLED = 4, 2
"""Number of steps in which compilations are counted, and how many of the last of these steps must have none."""
TIMED, BLOCK_S = 5, 0.1
FACTOR = 25.0
"""A squared difference is allowed to be this many times the squared difference caused by moving each weight by a unit in the
last place."""
MOST, SURE = 0.25, 4.0
"""A squared difference may be at most the larger of two limits: ``MOST`` of the gradient's squared norm, and ``SURE`` times the
difference that moving the weights causes. If a gradient is omitted, it differs by its whole norm. But five units in the last
place of bf16 can move a gradient through twenty layers by as much."""
JUMPS, DRAWS, SHARE = 4.0, 24, 0.5
"""In fp32 a relative difference is also allowed up to ``JUMPS`` times the largest jump of the whole gradient. The jump is the
largest of ``DRAWS`` random moves of the weights by the root of ``FACTOR`` units. These moves may take ``SHARE`` of the compile
time."""
NOISE = {"fp32": 0.01, "tf32": 0.5, "bf16": 0.5, "fp16": 0.5}
"""A gradient carries no signal if moving the weights by a unit in the last place moves it by at least this share of its squared
norm. In fp32 at most 1 % was observed for gradients with a signal and 18 % for pure noise; in bf16 56 % and 100 %."""
NEAR = 0.25
"""fp32 decides which of two gradients is better only if the squared relative error of the eager gradient is at most this."""
LEAST = {"fp32": 1e-6, "tf32": 1e-3, "bf16": 1e-3, "fp16": 1e-3}
"""Squared relative difference of a parameter's gradient that is always accepted, by the plan's coarsest format. It is relative
to the parameter's own gradient, or to the gradient of the whole model if the parameter's gradient carries no signal."""


@dataclass(frozen=True)
class CompileTrial:
    """The result of trying to compile a plan.

    Attributes:
        reason: Why the plan is not compiled; empty if it can be compiled.
        compile_s: Seconds that compiling took with an empty cache on disk.
        eager_s: Seconds per step in eager mode.
        gain: How many times as fast as in eager mode the compiled plan is; None if it was not timed.
        difference: The largest ratio of a gradient's squared difference to its tolerance.
        late: Whether the plan is not compiled because too little time was left.
    """

    reason: str = ""
    compile_s: float = 0.0
    eager_s: float = math.nan
    gain: Ratio | None = None
    difference: float = 0.0
    late: bool = False

    @property
    def step_s(self) -> float:
        """The seconds per step of the compiled plan; NaN if it was not timed."""
        return self.eager_s / self.gain.value if self.gain is not None else math.nan


def run_trial(
    _pipe: Connection, workload: bytes, line: str, device: str, seed: int, kind: Kind
) -> CompileTrial:
    """Try to compile a plan, in a new process that :class:`castwise.lab.timing.processes.Home` starts for it."""
    plan = Plan.from_json(line)
    belong_to(plan)
    attempt = try_served if kind is InferenceRun else try_compiled
    return attempt(received(workload), plan, torch.device(device), seed)


def try_served(workload: Workload, plan: Plan, device: torch.device, seed: int) -> CompileTrial:
    """Compile a plan for inference, test its outputs, and compare its times with those of the same plan in eager mode.

    The call changes process-wide settings of the compiler, so its process should do nothing else.
    """
    _torch.dynamo.refuse_to_give_up()
    workload = epochs_of(workload)
    model = build_model(workload, device, seed).eval()
    test = output_test(workload, model, device, iter(workload.batches(seed)), seed)
    eager = InferenceRun(workload, uncompiled(plan), device, seed)
    before, _ = _torch.dynamo.compilations()
    try:
        result = test.test(plan, compiled=True)
        count, compile_s = _torch.dynamo.compilations()
        if count == before:
            return CompileTrial(NOTHING)
        if result.verdict != "pass":
            return CompileTrial(f"not compiled: {result.reason}", compile_s)
        return _timed(eager, InferenceRun(workload, plan, device, seed), device, compile_s)
    except Exception as error:
        return CompileTrial(_why(error))


def try_compiled(workload: Workload, plan: Plan, device: torch.device, seed: int) -> CompileTrial:
    """Compile a plan, and compare its gradients and step times with those of the same plan in eager mode.

    The call changes process-wide settings of the compiler, so its process should do nothing else.
    """
    _torch.dynamo.refuse_to_give_up()
    eager = TrainingRun(workload, uncompiled(plan), device, seed)
    batches = iter(workload.batches(seed))
    data = [to_device(next(batches), device) for _ in range(BATCHES)]
    first = _gradients(eager, workload, data[0], 0)
    draws = _differs(first, _gradients(eager, workload, data[0], 1))
    try:
        with _torch.dynamo.eager_random_numbers() if draws else contextlib.nullcontext():
            compiled = TrainingRun(workload, plan, device, seed)
            worst, where = _difference(eager, compiled, workload, plan, data, device)
        if compiled.compilations == 0:
            return CompileTrial(NOTHING)
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
        return dataclasses.replace(_timed(eager, compiled, device), difference=worst)
    except Exception as error:
        return CompileTrial(_why(error))


def _why(error: Exception) -> str:
    """Say why a plan was not compiled, from the error that compiling raised."""
    if _torch.dynamo.gave_up(error):
        return "not compiled: it recompiles too often, for example for batches of different shapes"
    return f"does not compile: {sentence(getattr(error, 'inner_exception', error), whole=False)}"


@contextlib.contextmanager
def _in_force(run: TrainingRun) -> Iterator[None]:
    try:
        run.before(0)
        yield
    finally:
        run.after()


@contextlib.contextmanager
def _buffers_stay(model: torch.nn.Module) -> Iterator[None]:
    """Restore all buffers of the model at the end, so that every pass starts with the same running statistics and counters."""
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
    """Return the unscaled gradients of one batch, by parameter name, without an optimizer step or a change of buffers."""
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
    """Compare compiled gradients with eager ones.

    Returns:
        The largest ratio of a parameter's squared difference to its tolerance, and the name of that parameter. The ratio is NaN
        if no gradient is finite.
    """
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
                continue  # the loss scale is too high, or just at the limit: there is nothing to compare
            for found, one in zip((moved, error), beside, strict=True):
                d = float(in_fp64(one - mine).square().sum())
                found[name] = found.get(name, 0.0) + (d if math.isfinite(d) else math.inf)
            signal[name] = signal.get(name, 0.0) + float(in_fp64(mine).square().sum())
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
    """Return the ratio of each parameter's squared gradient difference to its tolerance; above 1 is too much."""
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
    """Move the weights at random, and yield after each draw the largest jump of the gradient so far.

    A jump is the squared change of a batch's whole gradient, divided by its squared norm.
    """
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
    """Return the parameters whose compiled gradients are at least as close to fp32 as the eager ones.

    A parameter is left out if its eager gradient is too far from fp32 to compare.
    """
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
    """Move the weights at random by up to a unit in the last place of a format, and restore them at the end."""
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


def _timed(
    eager: TrainingRun | InferenceRun,
    compiled: TrainingRun | InferenceRun,
    device: torch.device,
    compile_s: float | None = None,
) -> CompileTrial:
    """Time a compiled plan beside the same plan in eager mode, once it no longer compiles.

    ``compile_s`` are the seconds that compiling took, if the plan compiled before.
    """
    counts = []
    for _ in range(STEPS):
        compiled.block(1)
        counts.append(compiled.compilations)
    if compile_s is None:
        compile_s = compiled.compile_s
    if counts[-1] > counts[-1 - SETTLED]:
        return CompileTrial("not compiled: it recompiles at every step", compile_s)
    laps = race(
        [("eager", eager), ("compiled", compiled)], rounds=TIMED, device=device, hopeless=math.inf,
        steps=lambda step_s: dict.fromkeys(step_s, max(1, min(64, round(BLOCK_S / min(step_s.values()))))),
    )  # fmt: skip
    for lap in laps.values():
        lap.checked()
    eager_s = statistics.median(laps["eager"].seconds)
    return CompileTrial("", compile_s, eager_s, speedup(laps["eager"], laps["compiled"]))
