"""What each region costs in each format: unique modules timed alone, forward and backward, casts included.

A module is called with what it gets in a training step. Three ways are timed, in turns: fp32 among fp32; low among low;
and fp32 among low, which pays for casts at its border. Where the last beats the second, keeping the region in fp32 saves
time. This says what is worth a race, and a race on whole steps decides.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from castwise.casting import autocast
from castwise.casting.trees import cast_floating, map_tensors
from castwise.measure import ranks
from castwise.measure.failures import unfit
from castwise.measure.timing import synchronize
from castwise.plans.formats import FORMATS
from castwise.tuning.parts import Part

__all__ = ["Cost", "losing_parts", "measure_costs", "not_faster"]

HOPELESS = 10.0
"""A format that takes this many times fp32's time on a small piece of the input is not tried on all of it."""
SMALL_ELEMENTS = 1 << 14
"""Size of that piece."""
ROUNDS = 7
GAIN = 0.93
"""A region loses by the low format if fp32 with its casts takes less than this share of the low time."""
SLOWER = 1.15
"""A format is dropped before the race if its regions' times add up to this many times fp32's: what happens between regions
can still make up for less."""
WORTH = 0.004
"""A region whose gain is below this share of all regions' time is not worth a candidate."""


@dataclass(frozen=True)
class Cost:
    """Seconds that one training step spends in a part, all its modules together.

    Attributes:
        times_s: Per format, among regions of the same format; ``fp32`` is always there.
        bordered_s: fp32 among regions of the low format, per low format.
        reasons: Per format that was not timed, why.
    """

    times_s: dict[str, float]
    bordered_s: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass
class _Call:
    """A module as it was called, and how often modules like it are."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    counts: dict[str, int] = field(default_factory=dict)


def measure_costs(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    parts: Sequence[Part],
    formats: Sequence[str],
    device: torch.device,
    *,
    channels_last: bool = False,
    budget_s: float = 12.0,
    on_progress: Callable[[str], None] = lambda _what: None,
) -> dict[str, Cost]:
    """Time every part that has no other inside.

    Args:
        model: In fp32, on the device; its modules are copied.
        loss: Called with the model and the batch, to see with which inputs each module is called.
        batch: One of the workload's, on the device.
        parts: As :func:`~castwise.tuning.parts.find_parts` gives them.
        formats: Low formats to time beside fp32.
        device: Device that the model is on.
        channels_last: Time modules over images in this memory format.
        budget_s: Once it is spent, remaining modules go without.
        on_progress: Told what is timed.

    Returns:
        Costs by the part's pattern; parts that could not be timed alone are missing.
    """
    calls = _calls(model, loss, batch, [part for part in parts if not part.inner])
    sums: dict[str, list[tuple[int, Cost]]] = {}
    spent: set[str] = set()
    start = ranks.now()
    ordered = sorted(
        calls, key=lambda c: -_size(c.args) * sum(c.counts.values())
    )  # what matters most comes first
    for call in ordered:
        if ranks.now() - start > budget_s:
            spent.update(call.counts)
            continue
        on_progress(f"{type(call.module).__name__} in {', '.join(call.counts)}")
        try:
            cost = _time(call, formats, device, channels_last)
        except Exception:  # a module that cannot run by itself is timed with the whole step only
            spent.update(call.counts)
            continue
        for pattern, count in call.counts.items():
            sums.setdefault(pattern, []).append((count, cost))
    return {pattern: _sum(costs) for pattern, costs in sums.items() if pattern not in spent}


def _sum(costs: list[tuple[int, Cost]]) -> Cost:
    def add(name: str, table: str) -> float:
        return float(sum(count * getattr(cost, table)[name] for count, cost in costs))

    reasons = {name: why for _, cost in costs for name, why in cost.reasons.items()}
    names = [name for name in costs[0][1].times_s if all(name in cost.times_s for _, cost in costs)]
    times = {name: add(name, "times_s") for name in names}
    bordered = {name: add(name, "bordered_s") for name in names if name != "fp32"}
    return Cost(times, bordered, reasons)


def losing_parts(low: str, costs: dict[str, Cost]) -> list[str]:
    """Parts that take less time in fp32, casts at their borders included, than in a low format.

    Returns:
        Patterns, the largest gain first.
    """
    whole = sum(cost.times_s.get(low, cost.times_s["fp32"]) for cost in costs.values())
    gains = {}
    for pattern, cost in costs.items():
        taken = cost.times_s.get(low, math.inf)
        kept = cost.bordered_s.get(low, cost.times_s["fp32"])
        if kept < GAIN * taken and (taken == math.inf or taken - kept > WORTH * whole):
            gains[pattern] = taken - kept
    return sorted(gains, key=lambda pattern: -gains[pattern])


def _calls(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, parts: Sequence[Part]
) -> list[_Call]:
    """One call per unique module and input, with how often each part makes it."""
    modules = dict(model.named_modules())
    found: dict[str, _Call] = {}
    handles = []
    for part in parts:
        for path in part.paths:

            def hook(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], pattern: str = part.pattern
            ) -> None:
                key = _key(module, args, kwargs)
                if key not in found:
                    held = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), args)
                    named = map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), kwargs)
                    found[key] = _Call(module, held, named)
                counts = found[key].counts
                counts[pattern] = counts.get(pattern, 0) + 1

            handles.append(modules[path].register_forward_pre_hook(hook, with_kwargs=True))
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    try:
        loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
    return list(found.values())


def _key(module: nn.Module, args: Any, kwargs: Any) -> str:
    shapes = [tuple(p.shape) for p in module.parameters()]
    inputs: list[Any] = []

    def note(tensor: Tensor) -> Tensor:
        inputs.append((tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad))
        return tensor

    map_tensors(note, (args, kwargs))
    return f"{type(module).__qualname__} {module!r} {shapes} {inputs}"


def _size(value: Any) -> int:
    sizes = [1]

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    map_tensors(note, value)
    return max(sizes)


# --- timing one module ---------------------------------------------------------------------------------------


def _time(call: _Call, formats: Sequence[str], device: torch.device, channels_last: bool) -> Cost:
    def copied() -> tuple[nn.Module, Any, Any]:
        module = copy.deepcopy(call.module)
        for inner in module.modules():  # its inputs are leaves here, which nothing may write to
            if getattr(inner, "inplace", False) is True:
                inner.inplace = False  # type: ignore[assignment]
        if not channels_last:
            return module, call.args, call.kwargs
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return module, map_tensors(_to_channels_last, call.args), map_tensors(_to_channels_last, call.kwargs)

    module, args, kwargs = ranks.each("a copy of a module", copied)
    ways: dict[tuple[str, bool], Callable[[], None]] = {
        ("fp32", False): _runner(module, args, kwargs, None, False, device)
    }
    reasons: dict[str, str] = {}
    for name in formats:
        try:
            slowdown = _slowdown_on_a_piece(module, args, kwargs, name, device)
            if slowdown > HOPELESS:
                reasons[name] = f"takes {slowdown:.0f} times as long as fp32"
                continue
            run = functools.partial(_both, module, args, kwargs, name, device)
            ways[name, False], ways[name, True] = ranks.each(f"a module in {name}", run)
        except Exception as error:
            reasons[name] = unfit(error)
    seconds = _interleaved(ways, device)
    return Cost(
        {name: best for (name, bordered), best in seconds.items() if not bordered},
        {name: best for (name, bordered), best in seconds.items() if bordered},
        reasons,
    )


def _both(
    module: nn.Module, args: Any, kwargs: Any, low: str, device: torch.device
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A module among others of a low format, which has run once, and in fp32 among them."""
    in_low = _runner(module, args, kwargs, low, False, device)
    in_low()
    return in_low, _runner(module, args, kwargs, low, True, device)


def _to_channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4:
        return tensor
    return tensor.detach().contiguous(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


def _interleaved(
    ways: dict[tuple[str, bool], Callable[[], None]], device: torch.device
) -> dict[tuple[str, bool], float]:
    def a_round() -> list[float]:
        seconds = []
        for run in ways.values():
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        return seconds

    ranks.slowest("the first round of a module", a_round)  # builds kernels
    rounds = [ranks.slowest("a round of a module", a_round) for _ in range(ROUNDS - 1)]
    return {way: min(times) for way, times in zip(ways, zip(*rounds, strict=True), strict=True)}


def _runner(
    module: nn.Module, args: Any, kwargs: Any, low: str | None, bordered: bool, device: torch.device
) -> Callable[[], None]:
    """Forward and backward of a module in fp32, in a low format, or in fp32 between casts from and to it."""
    dtype = None if low is None else FORMATS[low].dtype
    held = args if dtype is None else _as_leaves(cast_floating(args, dtype), args)
    named = kwargs if dtype is None else _as_leaves(cast_floating(kwargs, dtype), kwargs)
    gradient: list[Tensor] = []

    def run() -> None:
        given, keywords = held, named
        if bordered:
            given, keywords = cast_floating(given, torch.float32), cast_floating(keywords, torch.float32)
        if low is not None and not bordered:
            with autocast(low, device_type=device.type):
                output = module(*given, **keywords)
        else:
            output = module(*given, **keywords)
        out = _first(output)
        if bordered and out is not None and dtype is not None:
            out = out.to(dtype)
        if out is None or not out.requires_grad:
            return
        if not gradient:
            gradient.append(torch.ones_like(out))
        out.backward(gradient[0])
        module.zero_grad()

    return run


def _as_leaves(cast: Any, original: Any) -> Any:
    return map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point() and _needs(original)), cast)


def _needs(value: Any) -> bool:
    needs = [False]

    def note(tensor: Tensor) -> Tensor:
        needs.append(tensor.requires_grad)
        return tensor

    map_tensors(note, value)
    return any(needs)


def _first(output: Any) -> Tensor | None:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            found.append(tensor)
        return tensor

    map_tensors(keep, output)
    return found[0] if found else None


def _slowdown_on_a_piece(module: nn.Module, args: Any, kwargs: Any, low: str, device: torch.device) -> float:
    """How many times fp32's time a format takes on a small piece of the input; 1 where none can be cut."""
    if low != "fp16" or device.type != "cpu":
        return 1.0
    for features_first in (False, True):
        cut = map_tensors(functools.partial(_piece, features_first=features_first), args)
        plain, reduced = (_runner(module, cut, kwargs, name, False, device) for name in (None, low))
        try:
            ranks.together("a module on a piece", plain)
        except Exception:  # the module does not take such a piece
            continue
        break
    else:
        return 1.0
    ranks.together(f"a module on a piece in {low}", reduced)
    seconds = _interleaved({("fp32", False): plain, (low, False): reduced}, device)
    return seconds[low, False] / max(seconds["fp32", False], 2e-5)  # dispatch alone says nothing


def _piece(tensor: Tensor, features_first: bool = False) -> Tensor:
    """The start of a tensor's samples and of its pixels, tokens or frames, never of its features.

    Three axes are ``[batch, tokens, features]`` for some modules and ``[batch, features, frames]`` for others: both are
    offered, and a module refuses the one that is not its own.
    """
    cut = tensor
    if cut.dim() == 4:
        cut = cut[:1, :, :16, :16]
    while cut.dim() > 1 and cut.numel() > SMALL_ELEMENTS and cut.shape[0] > 1:
        cut = cut[: max(1, cut.shape[0] // 2)]
    if cut.dim() == 5:
        cut = cut[:, :, :8, :8, :8]
    if cut.dim() == 3 and cut.numel() > SMALL_ELEMENTS and features_first:
        cut = cut[..., : max(16, SMALL_ELEMENTS // cut.shape[1])]
    elif cut.dim() == 3 and cut.numel() > SMALL_ELEMENTS:
        cut = cut[:, : max(1, SMALL_ELEMENTS // cut.shape[-1])]
    return cut.detach().clone().requires_grad_(tensor.requires_grad)


def not_faster(name: str, formats: Sequence[str], costs: dict[str, Cost]) -> str:
    """Why a low format cannot be part of the fastest plan, by the costs of parts alone.

    Args:
        name: Format that may be dropped from the search.
        formats: All low formats in the running.
        costs: As :func:`measure_costs` gives them.

    Returns:
        A clause, empty where it may be.
    """
    timed = {pattern: cost for pattern, cost in costs.items() if name in cost.times_s or name in cost.reasons}
    if not timed:
        return ""

    def total(low: str) -> float:
        return sum(
            min(cost.times_s.get(low, math.inf), cost.bordered_s.get(low, cost.times_s["fp32"]))
            for cost in timed.values()
        )

    fp32 = sum(cost.times_s["fp32"] for cost in timed.values())
    pattern, cost = max(timed.items(), key=lambda item: item[1].times_s["fp32"])
    slow = (
        cost.reasons.get(name)
        or f"takes {cost.times_s[name] / cost.times_s['fp32']:.1f} times as long as fp32"
    )
    if total(name) > SLOWER * fp32:
        return f"it is no faster than fp32, by regions alone; {pattern} {slow}"
    better = [other for other in formats if other != name and total(other) < 0.9 * total(name)]
    if better and any(name in cost.reasons for cost in timed.values()):
        return f"{better[0]} is faster in every region that counts; in {name} {pattern} {slow}"
    return ""
