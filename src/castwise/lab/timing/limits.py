"""Break down a training step's time: loading data, operators by kind of work and by shapes, and operator launches."""

from __future__ import annotations

import os
import statistics
import sys
import time
import timeit
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from castwise.core import devices
from castwise.core.casting.trees import to_device
from castwise.core.model.arrival import widen_
from castwise.lab.timing import stats
from castwise.lab.timing.runners import build_model
from castwise.lab.timing.timing import synchronize
from castwise.lab.workloads.workload import (
    Workload,
    check_loss,
    check_no_backward,
    make_optimizer,
    next_batch,
)

STEPS = 20
PROFILED = 5
BUDGET_S = 4.0
"""Steps are timed until there are STEPS of them or this time has passed, but at least three."""

MATRIX = frozenset(operator.__name__ for operator in flop_registry) | {
    "addbmm", "mkldnn_linear", "mkldnn_linear_backward", "mkldnn_convolution", "cudnn_convolution_transpose",
    "miopen_convolution", "_slow_conv2d_backward", "thnn_conv2d", "slow_conv3d_forward", "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward",
}  # fmt: skip
"""Operators that compute matrix products, without namespace: those whose flops torch counts, and similar ones.
Attention is recognised by its name."""
_ATTENTION = ("_attention_", "_dot_product_")
_VIEWS = frozenset({
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand",
    "is_nonzero", "item", "lift_fresh", "permute", "reshape", "resolve_conj", "resolve_neg", "result_type", "select",
    "slice", "squeeze", "t", "to", "transpose", "unsqueeze", "view",
})  # fmt: skip
"""Operators that compute nothing; they cost less than others, so they are not counted as launches."""


@dataclass(frozen=True)
class OperatorTime:
    """The calls of one operator on one set of shapes in a training step.

    Attributes:
        name: The profiler's name of the operator.
        share: Share of the time of all operators.
        calls: Number of calls per step.
        product: For matrix operators, the kind of product, from :func:`product_of`.
        kind: ``matrix``, ``depthwise``, ``optimizer`` or ``other``.
    """

    name: str
    share: float
    calls: float
    product: str
    kind: str


@dataclass(frozen=True)
class StepProfile:
    """How the time of a training step divides into data, operators and launches.

    Attributes:
        step_s: Seconds of forward, backward and optimizer, without the profiler.
        data_s: Seconds of ``next(batches)``, without the transfer to the device.
        data_share: Median over steps of data time / (data time + step time).
        operators: One entry per operator and set of shapes, the slowest first.
        launches: Number of operators per step that compute something and call no other operator.
        launch_s: Minimum time of one operator call, forward or backward, on this machine.
        busy_share: Share of a step during which an accelerator computes; None on a CPU, and if torch's profiler does not time
            the accelerator.
    """

    step_s: stats.Summary
    data_s: stats.Summary
    data_share: float
    operators: tuple[OperatorTime, ...]
    launches: float
    launch_s: float
    busy_share: float | None

    @property
    def outside_share(self) -> float:
        """The share of operator time that matrix units cannot speed up."""
        return sum(operator.share for operator in self.operators if operator.kind != "matrix")

    @property
    def launch_share(self) -> float:
        """The share of a step that is spent launching operators on the host, estimated from their number."""
        return min(1.0, self.launches * self.launch_s / self.step_s.median_s)


def profile_steps(
    workload: Workload, device: torch.device, *, seed: int = 0, steps: int = STEPS, budget_s: float = BUDGET_S
) -> StepProfile:
    """Train a newly built model of a workload in fp32 for a few steps, which are first timed and then profiled.

    Random numbers depend on the seed only, and torch's generators are restored. At most ``steps`` steps are timed. After
    ``budget_s`` seconds timing stops, but at least three steps are timed.

    Raises:
        WorkloadError: The batches end, or the loss is not a scalar.
        NonFiniteError: The loss of the first step is not finite.
    """
    with devices.same_random_numbers([device.type]):
        model = build_model(workload, device, seed).train()
        widen_(model)
        optimizer = make_optimizer(workload, model.parameters())
        batches = iter(workload.batches(seed))
        for number in range(2):
            batch = to_device(next_batch(workload, batches, number), device)
            _step(workload, model, optimizer, batch, check=number == 0)
        data: list[float] = []
        taken: list[float] = []
        begin = time.perf_counter()
        while len(taken) < 3 or (len(taken) < steps and time.perf_counter() - begin < budget_s):
            synchronize(device)
            start = time.perf_counter()
            batch = next_batch(workload, batches, 2 + len(taken))
            came = time.perf_counter()
            batch = to_device(batch, device)
            synchronize(device)
            ready = time.perf_counter()
            _step(workload, model, optimizer, batch)
            synchronize(device)
            data.append(came - start)
            taken.append(time.perf_counter() - ready)
        ready_made = [
            to_device(next_batch(workload, batches, 2 + len(taken) + i), device) for i in range(PROFILED)
        ]
        with _profiled(device) as profiler:
            for batch in ready_made:
                _step(workload, model, optimizer, batch)
            synchronize(device)
    step = stats.summarise(taken)
    operators, device_s = _operators(profiler)
    share = stats.quantile([d / (d + s) for d, s in zip(data, taken, strict=True)], 0.5)
    busy = min(1.0, device_s / step.median_s) if device_s else None
    return StepProfile(
        step, stats.summarise(data), share, operators, _launches(profiler) / PROFILED, _launch_s(), busy
    )


def _step(
    workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, *, check: bool = False
) -> None:
    loss = workload.loss(model, batch)
    if check:
        check_no_backward(model, f"workload {workload.name!r}")
        check_loss(loss, workload, batch, step=1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# --- operators ----------------------------------------------------------------------------------------------


@contextmanager
def _profiled(device: torch.device) -> Iterator[Any]:
    from torch.profiler import ProfilerActivity, profile

    own = devices.profiler_activity(device.type)
    activities = [ProfilerActivity.CPU] if own is None else [ProfilerActivity.CPU, own]
    profiler = profile(activities=activities, record_shapes=True, acc_events=True)
    with _quiet():
        profiler.start()
    try:
        yield profiler
    finally:
        with _quiet():
            profiler.stop()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress standard error during the block, since torch 2.13's profiler writes a line there when it starts and stops."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError):  # there is no standard error
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def operator_class(name: str, shapes: Sequence[Sequence[int]]) -> str:
    """Return an operator's kind of work, given the profiler's name of the operator and the shapes of its operands.

    Returns:
        ``matrix``, ``depthwise`` (a convolution that matrix units cannot speed up), ``optimizer`` or ``other``.
    """
    base = name.rpartition("::")[2]
    if base in MATRIX or any(part in base for part in _ATTENTION):
        return "depthwise" if product_of(name, shapes) == "depthwise" else "matrix"
    if base.startswith(("_foreach_", "_fused_")) or name.startswith("Optimizer."):
        return "optimizer"
    return "depthwise" if "depthwise" in base else "other"


def product_of(name: str, shapes: Sequence[Sequence[int]]) -> str:
    """Return the kind of product that an operator computes: ``matmul``, ``convolution`` or ``depthwise``.

    The result is empty if the operator computes no product, or if the shapes do not show one. In ``shapes``, an argument that is
    not a tensor has an empty shape.
    """
    base = name.rpartition("::")[2]
    operands = [tuple(shape) for shape in shapes if len(shape) >= 2]
    if base in ("mm", "bmm", "addmm", "baddbmm", "addbmm"):
        # the addend is the first operand and may be one-dimensional
        left_right = operands[-2:]
        return "matmul" if len(left_right) == 2 and left_right[0][-1] == left_right[1][-2] else ""
    images = [shape for shape in operands if len(shape) >= 3] if "conv" in base else []
    if base.startswith(("convolution_backward", "_slow_conv2d_backward")):
        images = images[1:]  # the gradient of the output is the first operand
    if len(images) < 2:
        return ""
    image, weight = images[:2]
    return "depthwise" if weight[1] == 1 and image[1] > 1 else "convolution"


def _operators(profiler: Any) -> tuple[tuple[OperatorTime, ...], float]:
    """Return the time share of each operator by shapes, and the seconds of a step that operators take on an accelerator.

    Times are those of the operator itself, without operators that it calls. They are device times if the profiler has them.
    """
    taken: dict[tuple[str, tuple[tuple[int, ...], ...]], list[float]] = defaultdict(list)
    events = profiler.events()
    on_device = any(event.self_device_time_total for event in events)
    for event in events:
        if not _is_operator(event.name):
            continue
        if on_device and str(event.device_type) != "DeviceType.CPU":
            continue  # the kernel itself is counted with the operator that launched it
        shapes = tuple(tuple(s) for s in event.input_shapes or () if _is_shape(s))
        taken[event.name, shapes].append(
            event.self_device_time_total if on_device else event.self_cpu_time_total
        )
    # a median, since other processes sometimes make a call many times longer
    own = {key: statistics.median(spent) * len(spent) / PROFILED for key, spent in taken.items()}
    total = sum(own.values())
    found = []
    for (name, shapes), spent in own.items():
        share, calls = spent / total if total else 0.0, len(taken[name, shapes]) / PROFILED
        found.append(OperatorTime(name, share, calls, product_of(name, shapes), operator_class(name, shapes)))
    return tuple(sorted(found, key=lambda operator: -operator.share)), total * 1e-6 if on_device else 0.0


def _is_shape(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(size, int) for size in value)


def _is_operator(name: str) -> bool:
    """Whether a profiler event is an operator.

    Autograd nodes and named ranges are not, since the operators inside them have events of their own.
    """
    return "::" in name and not name.startswith("autograd::")


def _launches(profiler: Any) -> int:
    """Return the number of operators that compute something and call no other operator that computes something."""

    def computes(name: str) -> bool:
        return _is_operator(name) and name.rpartition("::")[2] not in _VIEWS

    return sum(
        computes(event.name) and not any(computes(child.name) for child in event.cpu_children)
        for event in profiler.events()
    )


def _launch_s() -> float:
    """Measure the time of an operator on four elements on the CPU, a lower bound of the host's time per call on any device."""
    return (
        min(
            timeit.repeat(
                "add(x, x)",
                globals={"add": torch.add, "x": torch.zeros(4, device="cpu")},
                number=200,
                repeat=5,
            )
        )
        / 200
    )
