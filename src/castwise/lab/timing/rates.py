"""Measure the speed of a device: matrix products and convolutions in each format, and memory bandwidth.

Formats take turns on the same operator, and each is graded by the interval of its speed relative to fp32. A small probe goes
first, since some formats are emulated (fp16 on most CPUs is a hundred times slower than fp32), and a call at full size
would take seconds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from castwise.core.plans.plan import Plan
from castwise.core.ranks.group import first_line
from castwise.core.session.process import Claim, check_device
from castwise.errors import DeviceError
from castwise.lab.timing import stats
from castwise.lab.timing.timing import Calls, Lap, race, speedup

Grade = Literal["fast", "no gain", "avoid"]

HOPELESS = 8.0
"""A format this many times slower than fp32 in the probe is not measured at full size."""
CALL_S = 0.25
"""A format below half of fp32's rate that would take longer than this per call is not measured at full size either."""
ROUNDS = 9
BLOCK_S = 0.01
"""Target duration of a block of calls, in fp32: far above the clock's resolution."""


# --- formats and operators ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A way to compute that is measured: a format, and the format that fp32 operators may use internally.

    Attributes:
        name: ``fp32``, ``fp32 (tf32 inside)``, ``fp32 (bf16 inside)``, ``bf16`` or ``fp16``.
        dtype: The dtype of the operands.
        inside: For fp32, the value of a plan's ``fp32_matmul`` and ``fp32_conv``; fp32 itself is ``ieee``, so that
            the baseline is true fp32 even if torch defaults to TF32.
    """

    name: str
    dtype: torch.dtype
    inside: Literal["as_is", "ieee", "tf32", "bf16"] = "as_is"

    @property
    def plan(self) -> Plan:
        """A plan with the process-wide settings of this way to compute, and its format as ``compute``."""
        compute = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.dtype, "fp32")
        return Plan(compute=compute, fp32_matmul=self.inside, fp32_conv=self.inside)


FP32 = Variant("fp32", torch.float32, "ieee")
VARIANTS = (
    FP32,
    Variant("fp32 (tf32 inside)", torch.float32, "tf32"),
    Variant("fp32 (bf16 inside)", torch.float32, "bf16"),
    Variant("bf16", torch.bfloat16),
    Variant("fp16", torch.float16),
)


def variants(device_type: str) -> tuple[tuple[Variant, ...], tuple[tuple[Variant, str], ...]]:
    """Return the ways to compute (:class:`Variant`) that a device can run, and with reasons those that it cannot run.

    The first is fp32.
    """
    can: list[Variant] = []
    cannot: list[tuple[Variant, str]] = []
    for variant in VARIANTS:
        try:
            # a CPU without bf16 instructions still computes in bf16; the measurement shows how slowly
            if not (device_type == "cpu" and variant.dtype.itemsize == 2):
                check_device(variant.plan, device_type)
        except DeviceError as error:
            cannot.append((variant, str(error)))
        else:
            can.append(variant)
    return tuple(can), tuple(cannot)


@dataclass(frozen=True)
class Kernel:
    """One operator with operands of one size, whose speed is measured.

    Attributes:
        name: ``matmul``, ``conv3x3``, ``conv1x1`` or ``depthwise``.
        size: The size in words.
        flops: Floating-point operations per call; a multiplication and an addition count as two.
        inputs: Shapes of the two operands.
    """

    name: str
    size: str
    flops: int
    inputs: tuple[tuple[int, ...], tuple[int, ...]]
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def on(self, device: torch.device, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Return a function that calls the operator on random operands in a dtype on a device.

        Images are ``channels_last``, the layout that matrix units use.
        """
        generator = torch.Generator().manual_seed(0)
        tensors = []
        for shape in self.inputs:
            # about 1 / sqrt(terms), so that no format overflows or gets subnormal numbers
            scale = 1.0 / math.sqrt(math.prod(shape[1:]))
            tensor = (torch.randn(shape, generator=generator, device="cpu") * scale).to(
                device=device, dtype=dtype
            )
            if len(shape) == 4:
                tensor = tensor.to(memory_format=torch.channels_last)
            tensors.append(tensor)
        first, second = tensors
        return lambda: self.call(first, second)


def kernels(device_type: str, *, small: bool = False) -> tuple[Kernel, ...]:
    """Return the operators that are measured: a matrix product, and 3x3, 1x1 and depthwise 3x3 convolutions.

    Their sizes take a CPU about 10 ms in fp32, and fill a GPU. With ``small``, the sizes are those of a quick probe.
    """
    cpu = device_type == "cpu"
    side = (256 if cpu else 512) if small else (1024 if cpu else 4096)
    batch = (1 if cpu else 8) if small else (8 if cpu else 64)
    wide = 1 if cpu else 2
    return (
        matmul(side, side, side),
        _conv("conv3x3", batch, 64 * wide, 3, 28 if small else 56),
        _conv("conv1x1", batch, 256 * wide, 1, 14 if small else 28),
        _conv("depthwise", batch, 128 * wide, 3, 28 if small else 56, groups=128 * wide),
    )


def matmul(m: int, n: int, k: int) -> Kernel:
    """Return the matrix product ``[m, k] @ [k, n]`` as an operator to measure."""
    return _kernel("matmul", f"{m} x {k} x {n}", ((m, k), (k, n)), torch.mm)


def _conv(name: str, batch: int, channels: int, kernel: int, side: int, groups: int = 1) -> Kernel:
    size = f"batch {batch}, {channels} to {channels} channels, {side} x {side}"
    shapes = ((batch, channels, side, side), (channels, channels // groups, kernel, kernel))
    return _kernel(
        name, size, shapes, functools.partial(functional.conv2d, padding=kernel // 2, groups=groups)
    )


def _kernel(
    name: str,
    size: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Kernel:
    with FlopCounterMode(display=False) as counter:
        call(*(torch.empty(shape, device="meta") for shape in shapes))
    return Kernel(name, size, counter.get_total_flops(), shapes, call)


# --- grades -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """The speed of one operator in one format.

    Attributes:
        gflops: Median rate over rounds, in 1e9 operations per second, with its quartiles; None if it could not run.
        speedup: Speed relative to fp32; None for fp32 itself, or if the times do not determine it.
        grade: Grade of the speedup; None for fp32.
        probe: Whether the rate comes from the small probe because full size would take too long.
        error: Why the operator could not run; otherwise empty.
    """

    kernel: str
    size: str
    format: str
    gflops: float | None
    gflops_low: float | None = None
    gflops_high: float | None = None
    speedup: stats.Ratio | None = None
    grade: Grade | None = None
    probe: bool = False
    error: str = ""


@dataclass(frozen=True)
class FormatGrade:
    """A recommendation about a format on this device.

    Attributes:
        format: Name of the format.
        grade: ``fast`` if an operator is faster than in fp32; ``avoid`` if none is and one is slower; otherwise ``no gain``.
        reason: The measured ratios to fp32, or why the format cannot run.
        avoid_in: Operators that are slower than in fp32 in an otherwise fast format.
    """

    format: str
    grade: Grade
    reason: str
    avoid_in: tuple[str, ...] = ()


LOSS = 0.9
"""A format is to be avoided if its speed is certainly below this share of fp32's speed; a smaller loss does not count."""


def grade_of(speedup: stats.Ratio) -> Grade:
    """Return the grade of a speed relative to fp32: ``fast`` if its interval is above 1, ``avoid`` if below ``LOSS``.

    Otherwise the grade is ``no gain``.
    """
    if speedup.low > 1.0:
        return "fast"
    return "avoid" if speedup.high < LOSS else "no gain"


def grade_format(name: str, rates: Sequence[Rate]) -> FormatGrade:
    """Grade a format by the speeds of its operators.

    Depthwise convolutions are reported but do not count: memory bandwidth limits them, not matrix multiplication.

    Args:
        name: Name of the format.
        rates: The speeds of all operators in all formats.
    """
    mine = [rate for rate in rates if rate.format == name]
    counted = [rate for rate in mine if rate.kernel != "depthwise"]
    fast = [rate.kernel for rate in counted if rate.grade == "fast"]
    slow = [rate.kernel for rate in mine if rate.grade == "avoid"]
    loses = any(rate.grade == "avoid" for rate in counted)
    grade: Grade = "fast" if fast else "avoid" if loses else "no gain"
    reason = ", ".join(_ratio_words(rate) for rate in mine) or "not measured"
    return FormatGrade(name, grade, f"{reason} of fp32's rate", tuple(slow) if fast else ())


def _ratio_words(rate: Rate) -> str:
    if rate.error:
        return f"{rate.kernel} fails ({rate.error})"
    if rate.speedup is None:
        return f"{rate.kernel} not compared"
    return f"{rate.kernel} {_figures(rate.speedup.value)}x{' (small probe)' if rate.probe else ''}"


def _figures(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


# --- measuring ----------------------------------------------------------------------------------------------


class Loop:
    """Calls one operator in one format, so that :func:`castwise.lab.timing.timing.race` can time the calls."""

    def __init__(self, kernel: Kernel, variant: Variant, device: torch.device) -> None:
        self._call = kernel.on(device, variant.dtype)
        self._claim = Claim(replace(variant.plan, compute="fp32"), device.type)

    def before(self, steps: int) -> None:
        """Apply the process-wide settings of the format."""
        self._claim.take()

    def run(self, steps: int) -> None:
        """Call the operator ``steps`` times."""
        call = self._call
        with torch.inference_mode():
            for _ in range(steps):
                call()

    def after(self) -> None:
        """Restore the process-wide settings."""
        self._claim.close()


def measure_rates(
    device: torch.device,
    *,
    rounds: int = ROUNDS,
    small: bool = False,
    on_kernel: Callable[[str, int, int], None] | None = None,
) -> tuple[Rate, ...]:
    """Measure the speed of every operator in every format that the device can run, fp32 first.

    Nothing else should run on the device.

    Args:
        device: The device.
        rounds: Number of interleaved rounds; with fewer than six, intervals are wide.
        small: Measure only the small sizes of the probe, quickly and roughly.
        on_kernel: Called with an operator's name, the number of operators done and the total.
    """
    can, _ = variants(device.type)
    probes = kernels(device.type, small=True)
    full = probes if small else kernels(device.type)
    rates: list[Rate] = []
    for number, (probe, kernel) in enumerate(zip(probes, full, strict=True)):
        if on_kernel is not None:
            on_kernel(kernel.name, number, len(full))
        if small:
            rates += _rates(probe, can, device, rounds)
            continue
        out = {rate.format: rate for rate in _probe(probe, kernel, can, device)}
        kept = [variant for variant in can if variant.name not in out]
        measured = {rate.format: rate for rate in _rates(kernel, kept, device, rounds)}
        rates += [out.get(variant.name) or measured[variant.name] for variant in can]
    if on_kernel is not None:
        on_kernel(full[-1].name, len(full), len(full))
    return tuple(rates)


def _probe(probe: Kernel, kernel: Kernel, can: Sequence[Variant], device: torch.device) -> list[Rate]:
    """Measure a small size of an operator, and return the speeds in those formats that are not measured at full size.

    These are formats in which the operator fails, is much slower than in fp32, or is slower and would take too long.
    """
    out: list[Rate] = []
    least: dict[str, float] = {}
    for variant in can:
        try:
            least[variant.name] = _least_s(Loop(probe, variant, device), device)
        except RuntimeError as error:
            if variant is not can[0]:
                out.append(_failed(probe, variant.name, error, probe=True))
            continue
        ratio = least[can[0].name] / least[variant.name] if can[0].name in least else 1.0
        gflops = probe.flops / least[variant.name] / 1e9
        if ratio * HOPELESS < 1.0 or (ratio < 0.5 and kernel.flops / gflops / 1e9 > CALL_S):
            out.append(Rate(
                probe.name, probe.size, variant.name, gflops, speedup=_single(ratio), grade="avoid", probe=True
            ))  # fmt: skip
    return out


def _rates(kernel: Kernel, run: Sequence[Variant], device: torch.device, rounds: int) -> list[Rate]:
    runners = [(variant.name, Loop(kernel, variant, device)) for variant in run]
    try:
        steps = max(1, min(200, math.ceil(BLOCK_S / _least_s(runners[0][1], device))))
    except RuntimeError:  # the race will report it
        steps = 1
    laps = race(runners, rounds=rounds, steps=steps, device=device, hopeless=HOPELESS, sure_s=0.25)
    baseline = laps[runners[0][0]]
    return [_rate(kernel, name, baseline, laps[name]) for name, _ in runners]


def _least_s(loop: Loop, device: torch.device) -> float:
    """Return the minimum time of six single calls, in seconds, after a call that builds the kernel.

    The minimum is best, since other processes only ever make a call longer.
    """
    return min(race([("", loop)], rounds=6, steps=1, device=device, warmup=1)[""].checked())


def _rate(kernel: Kernel, name: str, baseline: Lap, lap: Lap) -> Rate:
    if lap.error is not None:
        return _failed(kernel, name, lap.error)
    times = lap.seconds
    ratio: stats.Ratio | None = None
    grade: Grade | None = None
    if lap is not baseline and baseline.error is None:
        ratio = speedup(baseline, lap)
        if ratio is None and lap.slowdown is not None:
            ratio = _single(1.0 / lap.slowdown)
            times = [stats.quantile(baseline.seconds, 0.5) * lap.slowdown] if baseline.seconds else []
        if ratio is not None:
            grade = grade_of(ratio)
    if not times:
        return Rate(kernel.name, kernel.size, name, None, None, None, ratio, grade)
    middle, low, high = (kernel.flops / stats.quantile(times, q) / 1e9 for q in (0.5, 0.75, 0.25))
    return Rate(kernel.name, kernel.size, name, middle, low, high, ratio, grade)


def _single(value: float) -> stats.Ratio:
    """Return a ratio that comes from one comparison and has no interval."""
    return stats.Ratio(value, value, value, 0.0, 1)


def _failed(kernel: Kernel, name: str, error: Exception, *, probe: bool = False) -> Rate:
    return Rate(kernel.name, kernel.size, name, None, grade="avoid", probe=probe, error=first_line(error))


@dataclass(frozen=True)
class Bandwidth:
    """The memory bandwidth of a device.

    Attributes:
        gb_per_s: Median rate of a copy, in 1e9 bytes per second; bytes read and bytes written are added.
        gb_per_s_low: Lower quartile of the rate.
        gb_per_s_high: Upper quartile of the rate.
        copied_bytes: Size of the copied tensor: larger than most caches.
    """

    gb_per_s: float
    gb_per_s_low: float
    gb_per_s_high: float
    copied_bytes: int


def measure_bandwidth(
    device: torch.device, *, copied_bytes: int = 256 * 2**20, repetitions: int = 7
) -> Bandwidth:
    """Measure memory bandwidth by timing copies of a tensor.

    Args:
        device: The device.
        copied_bytes: Size of the tensor, a multiple of 4. Twice this memory is allocated.
        repetitions: Number of timed rounds.
    """
    source = torch.ones(copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    copies = Calls(lambda: target.copy_(source))
    calls = 1 if device.type == "cpu" else 10
    lap = race([("", copies)], rounds=repetitions, steps=calls, device=device, warmup=1)[""]
    taken = lap.checked()  # after a warm-up copy, which maps the target's pages
    middle, low, high = (2 * copied_bytes / stats.quantile(taken, q) / 1e9 for q in (0.5, 0.75, 0.25))
    return Bandwidth(middle, low, high, copied_bytes)
