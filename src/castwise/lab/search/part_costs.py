"""The cost of each region in each format: unique modules timed alone, forward and backward, casts included.

A module is called with its inputs from a training step. Three cases are timed in turns: fp32 among fp32, low among low, and
fp32 among low, which includes the casts at its border. If the third beats the second, keeping the region in fp32 saves time.
This only selects candidates; a race on whole steps decides.
"""

from __future__ import annotations

import copy
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
from castwise.core.plans.formats import FORMATS
from castwise.lab.passes.isolation import unspoilt
from castwise.lab.search.regions import Part
from castwise.lab.timing.failures import cannot_run, unfit
from castwise.lab.timing.ranks import BY_ITSELF, Lockstep
from castwise.lab.timing.timing import Calls, Name, race

HOPELESS = 10.0
"""A format that takes this many times fp32's time on a small piece of the input is not timed on the whole input."""
SMALL_ELEMENTS = 1 << 14
"""Elements in that piece."""
ROUNDS = 6
FAR = 3.0
"""A case that takes this many times fp32's time is timed only twice."""
GAIN = 0.93
"""The low format makes a region slower if fp32 with its casts takes less than this share of the low time. A format gains
nothing if all regions, with the slower ones in fp32, take more than this share of fp32's time."""
SLOWER = 1.15
"""A format is dropped before the race if its regions' times add up to this many times fp32's: operations between regions can
make up for less. If the device has no units for the format, so that most of the time would be ``FAR`` times as long, they
cannot make up for it: the format is dropped if its regions gain nothing."""
MINOR = 0.25
"""Parts with one region name are kept in fp32 together if those that are faster in the low format lose less than this share of
what the region saves."""
WORTH = 0.004
"""A region that saves less than this share of all regions' time is not worth a candidate."""


@dataclass(frozen=True)
class Cost:
    """Seconds that one training step spends in all modules of a part.

    Attributes:
        times_s: Per format, among regions of the same format; ``fp32`` is always there.
        bordered_s: fp32 among regions of the low format, per low format.
        reasons: The reason for each format that was not timed.
    """

    times_s: dict[str, float]
    bordered_s: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass
class _Call:
    """A module with its inputs, and how often each part calls modules like it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def work(self) -> int:
        """Approximate amount of work: elements of the largest input, over all calls."""
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
    """Time every part without inner parts, those with the most work first.

    Args:
        model: In fp32, on the device; its modules are copied first.
        loss: Called with the model and the batch, to record the inputs of each module.
        batch: A batch on the device.
        parts: As returned by :func:`~castwise.lab.search.regions.find_parts`.
        formats: Low formats to time besides fp32.
        device: Device of model and batch.
        channels_last: Whether to time modules over images in this memory format.
        budget_s: Once it is spent, the remaining modules are not timed.
        on_progress: Called with the name of the timed module.
        ranks: The ranks that measure together.

    Returns:
        Costs by the part's pattern; parts with a module that does not run by itself are missing.

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
    """Parts that take less time in fp32, casts included, than in a low format.

    Parts of one kind that can be written as one region (``Part.like``) are grouped if this saves much more than it costs the
    parts that are faster in the low format: timing noise then determines which parts are slower by themselves, and one region
    is simpler than several. They are not grouped if one was not timed or cannot run low.

    Args:
        low: The low format.
        costs: By pattern.
        parts: Parts that may be grouped; without them each part stands alone.

    Returns:
        Groups of patterns, by seconds saved, largest first; parts that cannot run low come before all others.
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
    """Seconds saved by running the part in fp32 inside a low format."""
    return cost.times_s.get(low, math.inf) - cost.bordered_s.get(low, cost.times_s["fp32"])


def _saved(low: str, costs: Sequence[Cost], whole: float) -> float:
    """Seconds saved by keeping these parts in fp32; 0 if that is not worth a candidate."""
    saved = sum(_difference(low, cost) for cost in costs)
    taken = sum(cost.times_s.get(low, math.inf) for cost in costs)
    worth = taken == math.inf or (taken - saved < GAIN * taken and saved > WORTH * whole)
    return saved if worth else 0.0


def _calls(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, parts: Sequence[Part]
) -> list[_Call]:
    """One call per unique module and input, with how often each part makes it."""
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
    """Times of one call in each format; None for a module that does not run by itself."""

    def alone() -> tuple[nn.Module, Any, Any, Callable[[], None]]:
        module, given = copy.deepcopy(call.module), (call.args, call.kwargs)
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
    except Exception:  # it ran inside its model, so it needs something from there, or it cannot be copied
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
    """Run a module inside a low format, in that format and in fp32; each has run once, to build its kernels."""
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
    """The least seconds of each; one that takes ``hopeless`` times as long as the first is timed at most twice."""
    laps = race(
        [(name, Calls(way)) for name, way in ways.items()], rounds=ROUNDS, steps=1, device=device, warmup=0, hopeless=hopeless,
        ranks=ranks,
    )  # fmt: skip
    return {name: min(lap.checked()) for name, lap in laps.items()}


def _runner(
    module: nn.Module, args: Any, kwargs: Any, low: str | None, bordered: bool, device: torch.device
) -> Callable[[], None]:
    """Forward and backward of a module in fp32, in a low format, or in fp32 with casts at its border."""
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
    """How many times fp32's time a format without CPU units takes on a small piece of the input; 1 if no piece can be cut."""
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
    """The first samples of a tensor, and the first of its pixels, tokens or frames; all of its features.

    Three axes are ``[batch, tokens, features]`` for some modules and ``[batch, features, frames]`` for others: both are tried,
    and a module rejects the wrong one.
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
    """Whether most of the parts' time would be at least ``FAR`` times as long in a low format."""
    base_s = {pattern: cost.times_s["fp32"] for pattern, cost in costs.items()}
    far_s = sum(s for pattern, s in base_s.items() if costs[pattern].times_s.get(low, math.inf) >= FAR * s)
    return 2.0 * far_s > sum(base_s.values())


def not_faster(name: str, formats: Sequence[str], costs: dict[str, Cost]) -> str:
    """Why a low format out of ``formats`` cannot be in the fastest plan, by the costs of parts alone; empty if it can."""
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
