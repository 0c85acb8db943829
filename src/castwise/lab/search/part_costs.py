"""Time each module alone in each format, forward and backward, including the casts of its inputs and outputs.

A module is called with its inputs from a training step; modules of equal structure and inputs are timed once. Three cases are
timed in turns: fp32 among fp32 modules, low among low modules, and fp32 among low modules. Only the third needs casts. If the
third is faster than the second, keeping the module in fp32 saves time. These times only select plans to try; a race on whole
steps decides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting import autocast
from castwise.core.casting.trees import cast_floating, map_tensors, tensors_in
from castwise.core.model.copying import copy_of
from castwise.core.plans.formats import FORMATS
from castwise.lab.passes.isolation import unspoilt
from castwise.lab.passes.regions import Part
from castwise.lab.timing.failures import cannot_run, unfit
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep
from castwise.lab.timing.timing import Calls, Name, race

HOPELESS = 10.0
"""If a format takes this many times fp32's time on a small piece of the input, it is not timed on the whole input."""
SMALL_ELEMENTS = 1 << 14
"""Number of elements in that piece."""
ROUNDS = 6
FAR = 3.0
"""A case that takes this many times fp32's time is timed at most twice."""
GAIN = 0.93
"""The low format makes a region slower if fp32 with its casts takes less than this share of the time in the low format. A
format gains nothing if all regions together take more than this share of fp32's time, with the slower regions in fp32."""
SLOWER = 1.15
"""A format is dropped before the race if its regions' times add up to this many times fp32's. A smaller loss can be made up by
operations between regions. If the device has no units for the format (:func:`lacks_units`), they cannot make up for it. Then
the format is already dropped if its regions gain nothing (``GAIN``)."""
MINOR = 0.25
"""Parts that one region can name are kept in fp32 together although some of them are faster in the low format, if that costs
less than this share of what the region saves."""
WORTH = 0.004
"""No plan keeps a region in fp32 if that saves less than this share of all regions' time."""


@dataclass(frozen=True)
class Cost:
    """The seconds that one training step spends in all modules of a part (:class:`~castwise.lab.passes.regions.Part`).

    Attributes:
        times_s: Seconds by format, if the surrounding regions have the same format; ``fp32`` is always there.
        bordered_s: By low format, the seconds in fp32 if the surrounding regions run in that low format.
        reasons: The reason for each format that was not timed.
    """

    times_s: dict[str, float]
    bordered_s: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass
class _Call:
    """A module with its recorded inputs, and how often each part calls such a module with such inputs."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def work(self) -> int:
        """The approximate amount of work: elements of the largest input, times the number of calls."""
        return max((tensor.numel() for tensor in tensors_in(self.args)), default=1) * self.counts.total()


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
    ranks: Lockstep = BY_ITSELF,
) -> dict[str, Cost]:
    """Time every part of the model that contains no other part. Those with the most work come first.

    Args:
        model: The model in fp32, on the device. Its modules are copied before they run.
        loss: Called with the model and the batch, to record the inputs of each module.
        batch: A batch on the device.
        parts: As returned by :func:`~castwise.lab.passes.regions.find_parts`.
        formats: Low formats to time besides fp32.
        device: Device of model and batch.
        channels_last: Whether to time modules over images in this memory format.
        budget_s: Seconds after which the remaining modules are not timed.
        on_progress: Called with the name of the module that is timed next.
        ranks: The ranks that measure together.

    Returns:
        Costs by the part's pattern. A part is missing if one of its modules was not timed, for lack of time or because it does
        not run by itself.

    Raises:
        Exception: An error of a module in a low format, unless it says that the module cannot run in that format.
    """
    costs: dict[str, list[tuple[int, Cost]]] = {}
    without: set[str] = set()
    start = ranks.now()
    calls = _calls(model, loss, batch, [part for part in parts if not part.inner])
    for call in sorted(calls, key=lambda call: -call.work):
        cost = None
        if ranks.now() - start <= budget_s:
            on_progress(f"{type(call.module).__name__} in {', '.join(call.counts)}")
            cost = _time(call, formats, device, channels_last, ranks)
        if cost is None:
            without.update(call.counts)
            continue
        for pattern, count in call.counts.items():
            costs.setdefault(pattern, []).append((count, cost))
    return {pattern: _sum(found) for pattern, found in costs.items() if pattern not in without}


def _sum(costs: list[tuple[int, Cost]]) -> Cost:
    names = [name for name in costs[0][1].times_s if all(name in cost.times_s for _, cost in costs)]
    return Cost(
        {name: sum(count * cost.times_s[name] for count, cost in costs) for name in names},
        {
            name: sum(count * cost.bordered_s[name] for count, cost in costs)
            for name in names
            if name != "fp32"
        },
        {name: why for _, cost in costs for name, why in cost.reasons.items()},
    )


def losing_parts(low: str, costs: dict[str, Cost], parts: Sequence[Part] = ()) -> list[tuple[str, ...]]:
    """Return the parts of the model that take less time in fp32, including the casts, than in a low format.

    Parts of one kind that can be written as one region (``Part.like``) are grouped if that saves much more than it costs those
    that are faster in the low format. Otherwise timing noise would determine which of them are slower, and one region is
    simpler than several. They are not grouped if one of them was not timed or cannot run in the low format.

    Args:
        low: The low format.
        costs: The costs of parts, by pattern.
        parts: Parts that may be grouped; without them each part stands alone.

    Returns:
        Groups of patterns, by seconds saved, largest first; parts that cannot run in the low format come before all others.
    """
    whole = sum(cost.times_s.get(low, cost.times_s["fp32"]) for cost in costs.values())
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(part.like or part.pattern, []).append(part)
    gains: dict[tuple[str, ...], float] = {}
    for members in groups.values():
        each = [costs[part.pattern] for part in members if low in costs.get(part.pattern, Cost({})).times_s]
        if len(each) == len(members) and len({part.kind for part in members}) == 1:
            lost = sum(max(0.0, -_difference(low, cost)) for cost in each)
            saved = _saved(low, each, whole)
            if lost < MINOR * saved:
                gains[tuple(part.pattern for part in members)] = saved
    grouped = {pattern for group in gains for pattern in group}
    gains |= {(p,): _saved(low, [cost], whole) for p, cost in costs.items() if p not in grouped}
    return sorted((group for group in gains if gains[group]), key=lambda group: -gains[group])


def _difference(low: str, cost: Cost) -> float:
    """Return the seconds saved by running one part of the model in fp32 while the rest runs in a low format."""
    return cost.times_s.get(low, math.inf) - cost.bordered_s.get(low, cost.times_s["fp32"])


def _saved(low: str, costs: Sequence[Cost], whole: float) -> float:
    """Return the seconds saved by keeping these parts of the model in fp32; 0 if that is too little to try."""
    saved = sum(_difference(low, cost) for cost in costs)
    taken = sum(cost.times_s.get(low, math.inf) for cost in costs)
    worth = taken == math.inf or (taken - saved < GAIN * taken and saved > WORTH * whole)
    return saved if worth else 0.0


def _calls(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, parts: Sequence[Part]
) -> list[_Call]:
    """Return one call for each kind of module and input, with the number of such calls in each part of the model."""
    modules = dict(model.named_modules())
    found: dict[str, _Call] = {}
    with ExitStack() as hooks, unspoilt(model):
        for path, pattern in [(path, part.pattern) for part in parts for path in part.paths]:

            def hook(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], pattern: str = pattern
            ) -> None:
                key = _key(module, args, kwargs)
                if key not in found:
                    found[key] = _Call(module, *map_tensors(_copy, (args, kwargs)))
                found[key].counts[pattern] += 1

            hooks.enter_context(modules[path].register_forward_pre_hook(hook, with_kwargs=True))
        loss(model, batch)
    return list(found.values())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _key(module: nn.Module, args: Any, kwargs: Any) -> str:
    shapes = [tuple(p.shape) for p in module.parameters()]
    inputs = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors_in((args, kwargs))]
    return f"{type(module).__qualname__} {module!r} {shapes} {inputs}"


# --- timing one module ---------------------------------------------------------------------------------------


def _time(
    call: _Call, formats: Sequence[str], device: torch.device, channels_last: bool, ranks: Lockstep
) -> Cost | None:
    """Time one call in each format; None for a module that does not run by itself."""

    def alone() -> tuple[nn.Module, Any, Any, Callable[[], None]]:
        module, given = copy_of(call.module), (call.args, call.kwargs)
        for (
            inner
        ) in module.modules():  # the inputs are leaves here, and in-place operators may not write to them
            if getattr(inner, "inplace", False) is True:
                inner.inplace = False  # type: ignore[assignment]
        if channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            given = map_tensors(_to_channels_last, given)
        run = _runner(module, *given, None, False, device)
        run()
        run()  # a module that keeps state may fail the second time
        return module, *given, run

    try:
        module, args, kwargs, in_fp32 = ranks.at("a module by itself").each(alone)
    except Exception:  # the module needs something from the model around it, or it cannot be copied
        return None
    ways: dict[tuple[str, bool], Callable[[], None]] = {("fp32", False): in_fp32}
    reasons: dict[str, str] = {}
    for name in formats:
        try:
            slowdown = _slowdown_on_a_piece(module, args, kwargs, name, device, ranks)
            if slowdown > HOPELESS:
                reasons[name] = f"takes {slowdown:.0f} times as long as fp32"
                continue
            run = partial(_both, module, args, kwargs, name, device)
            ways[name, False], ways[name, True] = ranks.at(f"a module in {name}").each(run)
        except Exception as error:
            if not cannot_run(error):
                raise
            reasons[name] = unfit(error)
    seconds = _least_s(ways, device, ranks)
    return Cost(
        {name: best for (name, bordered), best in seconds.items() if not bordered},
        {name: best for (name, bordered), best in seconds.items() if bordered},
        reasons,
    )


def _both(
    module: nn.Module, args: Any, kwargs: Any, low: str, device: torch.device
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that run a module in a low format, and in fp32 with casts from and to that format.

    Each has already been called once, so that its kernels are built.
    """
    in_low, in_fp32 = (_runner(module, args, kwargs, low, bordered, device) for bordered in (False, True))
    in_low()
    in_fp32()
    return in_low, in_fp32


def _to_channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4:
        return tensor
    return tensor.detach().to(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


def _least_s(
    ways: Mapping[Name, Callable[[], None]], device: torch.device, ranks: Lockstep, hopeless: float = FAR
) -> dict[Name, float]:
    """Return the fewest seconds that each function took.

    A function that takes ``hopeless`` times as long as the first is timed at most twice.
    """
    laps = race(
        [(name, Calls(way)) for name, way in ways.items()], rounds=ROUNDS, steps=1, device=device, warmup=0, hopeless=hopeless,
        ranks=ranks,
    )  # fmt: skip
    return {name: min(lap.checked()) for name, lap in laps.items()}


def _runner(
    module: nn.Module, args: Any, kwargs: Any, low: str | None, bordered: bool, device: torch.device
) -> Callable[[], None]:
    """Return a function that runs forward and backward of a module.

    The module runs in fp32 if ``low`` is None, else in the low format. With ``bordered`` it runs in fp32, its inputs are cast
    from the low format, and its output is cast back.
    """
    dtype = None if low is None else FORMATS[low].dtype
    held = args if dtype is None else _as_leaves(cast_floating(args, dtype), args)
    named = kwargs if dtype is None else _as_leaves(cast_floating(kwargs, dtype), kwargs)
    gradient: list[Tensor] = []

    def run() -> None:
        given, keywords = held, named
        if bordered:
            given, keywords = cast_floating((given, keywords), torch.float32)
        low_inside = autocast(low, device_type=device.type) if low and not bordered else nullcontext()
        with low_inside:
            output = module(*given, **keywords)
        out = next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)
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
    trained = any(tensor.requires_grad for tensor in tensors_in(original))
    return map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point() and trained), cast)


def _slowdown_on_a_piece(
    module: nn.Module, args: Any, kwargs: Any, low: str, device: torch.device, ranks: Lockstep
) -> float:
    """Return how many times fp32's time a format without CPU units takes on a small piece of the input.

    Return 1 for other devices and formats, or if no piece can be cut that the module accepts.
    """
    if device.type != "cpu" or (low == "bf16" and _torch.cpu.cpu_has_bf16()):
        return 1.0
    for features_first in (False, True):
        cut = map_tensors(partial(_piece, features_first=features_first), args)
        plain, reduced = (_runner(module, cut, kwargs, name, False, device) for name in (None, low))
        try:
            ranks.at("a module on part of its input").each(plain)
        except Exception:  # the module does not accept such a piece
            continue
        break
    else:
        return 1.0
    ranks.at(f"a module on part of its input in {low}").each(reduced)
    seconds = _least_s({"fp32": plain, low: reduced}, device, ranks, math.inf)
    return seconds[low] / max(seconds["fp32"], 2e-5)  # dispatch overhead alone proves nothing


def _piece(tensor: Tensor, features_first: bool = False) -> Tensor:
    """Return a small piece of a tensor: its first samples, and of these the first pixels, tokens or frames with all features.

    Three axes are ``[batch, tokens, features]`` for some modules and ``[batch, features, frames]`` for others. Both cuts are
    tried, and a module rejects the wrong one.
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


def lacks_units(low: str, costs: Mapping[str, Cost]) -> bool:
    """Whether modules that take most of the time in fp32 would take at least ``FAR`` times as long in a low format."""
    base_s = {pattern: cost.times_s["fp32"] for pattern, cost in costs.items()}
    far_s = sum(s for pattern, s in base_s.items() if costs[pattern].times_s.get(low, math.inf) >= FAR * s)
    return 2.0 * far_s > sum(base_s.values())


def not_faster(name: str, formats: Sequence[str], costs: dict[str, Cost]) -> str:
    """Say why the times of single modules show that a low format cannot be in the fastest plan; empty if it can.

    ``formats`` are the low formats with which it is compared.
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

    def loses(item: tuple[str, Cost]) -> tuple[bool, float]:
        low, base = item[1].times_s.get(name), item[1].times_s["fp32"]
        return name in item[1].reasons, base if low is None else low - base

    pattern, cost = max(timed.items(), key=loses)
    slow = (
        cost.reasons.get(name)
        or f"takes {cost.times_s[name] / cost.times_s['fp32']:.1f} times as long as fp32"
    )
    better = [
        other for other in formats if other != name and total(other) < min(0.9 * total(name), GAIN * fp32)
    ]
    if better and (total(name) > GAIN * fp32 or any(name in cost.reasons for cost in timed.values())):
        return f"timed module by module, {better[0]} is faster: in {name} {pattern} {slow}"
    if total(name) > (GAIN if lacks_units(name, timed) else SLOWER) * fp32:
        gain = 1.0 - total(name) / fp32
        said = (
            f"it saves at most {gain:.0%} of fp32's time"
            if round(gain, 2) > 0.0
            else "it is no faster than fp32"
        )
        return f"timed module by module, {said}: {pattern} {slow}"
    return ""
