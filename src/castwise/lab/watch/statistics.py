"""Compute the statistics of a sampled step: sums over gradients, weights, updates and outputs.

The sums stay on the device and are read all at once. No function here is recorded by autograd, draws random numbers, or writes
to tensors that the training uses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core import _torch, masters
from castwise.core.casting.trees import tensors_in
from castwise.core.plans.formats import FORMATS
from castwise.core.ranks.pieces import summed
from castwise.core.scaler import gradients

ELEMENTS = 2**14
"""Largest number of elements that are read from the update of a parameter, or from a tensor of which a share is counted."""
CALLS = 4
"""Largest number of a module's calls that are observed per step, among calls with gradients enabled."""
_FP16 = FORMATS["fp16"]
_T = TypeVar("_T")
NEAR = _FP16.max / 8
_ROUNDING = _FP16.smallest_subnormal**2 / 12
"""Expected squared error of rounding to a multiple of the smallest subnormal number."""


class Number(NamedTuple):
    """A statistic of a module that is still on the device.

    Attributes:
        region: Path of the module.
        name: Name of the statistic. Numbers with the same name are added, or the largest is taken if the name starts with
            ``max_``.
        value: The statistic as a 0-dim tensor.
        weight: Factor by which a sum over ranks counts each element once.
    """

    region: str
    name: str
    value: Tensor
    weight: float = 1.0


_NORMS = ("gradient", "weight", "sampled", "update", "held", "drift")
"""Names of statistics that are norms. They are combined as sums of squares."""
Numbers = dict[tuple[str, str], float]
"""Values by module path and name of the statistic."""


def read(numbers: Iterable[Number]) -> Numbers:
    """Read numbers from the device and combine those of the same module and name. The host waits once for each device."""
    by_device: dict[torch.device, list[Number]] = defaultdict(list)
    for number in numbers:
        by_device[number.value.device].append(number)
    out: Numbers = {}
    for some in by_device.values():
        host = torch.stack([number.value.float() for number in some]).tolist()
        for number, value in zip(some, host, strict=True):
            value = value * value if number.name in _NORMS else value
            _put(out, (number.region, number.name), value * number.weight)
    return out


def join(parts: Iterable[Numbers]) -> Numbers:
    """Combine the numbers of all ranks into one mapping."""
    out: Numbers = {}
    for part in parts:
        for key, value in part.items():
            _put(out, key, value)
    return out


def _put(out: Numbers, key: tuple[str, str], value: float) -> None:
    if key not in out:
        out[key] = value
    elif not key[1].startswith("max_"):
        out[key] += value
    elif math.isnan(value) or value > out[key]:  # NaN persists
        out[key] = value


def aside(device_type: str, call: Callable[..., _T], *args: Any) -> _T:
    """Call a function without autograd and without autocast."""
    casts = torch.is_autocast_enabled(device_type)
    if casts:
        torch.set_autocast_enabled(device_type, False)
    try:
        return _torch.tensors.without_grad(call, *args)  # type: ignore[no-any-return]
    finally:
        if casts:
            torch.set_autocast_enabled(device_type, True)


# --- outputs ------------------------------------------------------------------------------------------------


def owners(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with parameters of their own and their paths. Paths in a second model start with ``1:``."""
    for number, model in enumerate(models):
        for path, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                yield (f"{number}:" if number else "") + path, module


def region_of(models: Iterable[nn.Module]) -> dict[int, str]:
    """Map the ``id`` of each parameter, and of its master, to the path of its module."""
    out: dict[int, str] = {}
    for path, module in owners(models):
        for parameter in module.parameters(recurse=False):
            for tensor in (parameter, masters.master_of(parameter)):
                if tensor is not None:
                    out.setdefault(id(tensor), path)
    return out


class Outputs:
    """Observes outputs of modules, and the gradients of fp16 outputs, between :meth:`arm` and :meth:`disarm`."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._handles: list[Any] = []
        self._calls: dict[str, int] = {}
        self.numbers: list[Number] = []
        self.failed = ""

    @property
    def armed(self) -> bool:
        """Whether hooks are registered on modules."""
        return bool(self._handles)

    def arm(self, models: Iterable[nn.Module], compiled: Container[nn.Module]) -> None:
        """Register hooks on all modules that have parameters of their own, except compiled modules."""
        self.disarm()
        for path, module in owners(models):
            if module in compiled:
                continue
            # the hook runs before all other hooks of the module, so before the output is cast at the border of a region
            self._handles.append(module.register_forward_hook(_Ear(self, path), prepend=True))

    def disarm(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def take(self) -> list[Number]:
        """Return the numbers that were collected since the last call."""
        numbers, self.numbers, self._calls = self.numbers, [], {}
        return numbers

    def see(self, path: str, output: Any) -> None:
        """Observe a module's output. A failure is noted and not raised."""
        try:
            self._see(path, output)
        except Exception as error:
            self.failed = f"outputs of {path or 'the model'}: {type(error).__name__}: {error}"

    def _see(self, path: str, output: Any) -> None:
        if not torch.is_grad_enabled():
            return  # evaluation, or recomputation in backward
        calls = self._calls[path] = self._calls.get(path, 0) + 1
        if calls > CALLS:
            return
        aside(self._device_type, self._measure, path, output)

    def _measure(self, path: str, output: Any) -> None:
        for tensor in tensors_in(output):
            if not tensor.is_floating_point() or tensor.layout is not torch.strided:
                continue
            values = masters.local(summed(tensor))
            if not values.numel():
                continue
            self.numbers.append(Number(path, "max_output", _largest(values)))
            if values.dtype is torch.float16:
                some = _some(values).abs()
                self.numbers.append(Number(path, "outputs", _count(some.numel(), some)))
                self.numbers.append(Number(path, "near", (some > NEAR).sum()))
                if tensor.grad_fn is not None:  # on a leaf the hook would persist
                    tensor.register_hook(_GradientEar(self, path))

    def see_gradient(self, path: str, gradient: Tensor) -> None:
        """Observe the gradient of an output. A failure is noted and not raised."""
        try:
            self._see_gradient(path, gradient)
        except Exception as error:
            self.failed = f"gradients of outputs of {path or 'the model'}: {type(error).__name__}: {error}"

    def _see_gradient(self, path: str, gradient: Tensor) -> None:
        if gradient.dtype is not torch.float16 or gradient.layout is not torch.strided:
            return
        aside(self._device_type, self._measure_gradient, path, gradient)

    def _measure_gradient(self, path: str, gradient: Tensor) -> None:
        values = masters.local(gradient)
        if not values.numel():
            return
        some = _some(values).abs().float()
        zero, small = some == 0, some < _FP16.smallest_normal
        add = self.numbers.append
        add(Number(path, "gradients", _count(some.numel(), some)))
        add(Number(path, "zero", zero.sum()))
        add(Number(path, "small", small.sum()))
        add(Number(path, "energy", some.square().sum()))


class _Ear:
    """A forward hook that observes outputs. In copies and pickles of the module it is replaced by a hook that does nothing."""

    def __init__(self, outputs: Outputs, path: str) -> None:
        self._outputs, self._path = outputs, path

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._outputs.see(self._path, output)

    def __reduce__(self) -> Any:
        return Deaf, ()


class Deaf:
    """The hook in a copy of a module: a callable that does nothing."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


class _GradientEar:
    """A tensor hook that observes the gradient of an output."""

    def __init__(self, outputs: Outputs, path: str) -> None:
        self._outputs, self._path = outputs, path

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # None: an unused output of an operator with another output that is used
            self._outputs.see_gradient(self._path, gradient)


def _largest(values: Tensor) -> Tensor:
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high).float()


def _count(number: int, like: Tensor) -> Tensor:
    return torch.full((), float(number), device=like.device)


def _some(values: Tensor) -> Tensor:
    """Return at most ``ELEMENTS`` elements, evenly spaced over a tensor; in memory order if the tensor is dense."""
    flat = _flat(values)
    return flat[:: -(-flat.numel() // ELEMENTS)] if flat.numel() > ELEMENTS else flat


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _flat(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    if span == values.numel():
        return values.as_strided((span,), (1,), values.storage_offset())
    return values.reshape(-1)


# --- parameters ---------------------------------------------------------------------------------------------


class Update:
    """The statistics of one optimizer step: gradients and weights before the step, and the update.

    Args:
        optimizer: The optimizer of the step.
        regions: Module paths, as :func:`region_of` returns them.
        weight: Returns for a parameter the factor by which a sum over ranks counts each element once.

    Attributes:
        scaled: Whether the gradients are still multiplied by the loss scale.
        after: For each parameter, the parameter and a copy of its observed elements after the step.
    """

    def __init__(
        self, optimizer: Optimizer, regions: Mapping[int, str], weight: Callable[[Tensor], float]
    ) -> None:
        self._optimizer, self._regions, self._weight = optimizer, regions, weight
        self._before: list[tuple[Tensor, Tensor]] = []
        self.after: list[tuple[Tensor, Tensor]] = []
        self.scaled = False
        self.numbers: list[Number] = []

    def see_gradients(self) -> None:
        """Observe the gradients, before the step or, if the step computes them itself by a closure, after it."""
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        pairs = list(zip(params, gradients.on_each(self._optimizer), strict=True))
        found = [
            (p, gradients.values(grad.detach())) for p, grad in pairs if grad is not None and grad.numel()
        ]
        self._norms("gradient", [p for p, _ in found], [grad for _, grad in found])

    def see_weights(self) -> None:
        """Observe the weights before the step."""
        params = [
            p for group in self._optimizer.param_groups for p in group["params"] if masters.local(p).numel()
        ]
        self._norms("weight", params, [gradients.values(p.detach()) for p in params])
        self._before = [(p, _some(masters.local(p)).clone()) for p in params]

    def see_drift(self, last: Update) -> None:
        """Observe how far the weights have moved since the last observed step."""
        ends = {id(p): then for p, then in last.after}
        kept = [(p, ends[id(p)], now) for p, now in self._before if id(p) in ends]
        kept = [
            (p, then, now) for p, then, now in kept if then.shape == now.shape and then.dtype is now.dtype
        ]
        self._norms("held", [p for p, _, _ in kept], [then for _, then, _ in kept])
        if kept:
            moved = _torch.tensors.each_sub(
                [_wide(now) for *_, now in kept], [_wide(then) for _, then, _ in kept]
            )
            self._norms("drift", [p for p, _, _ in kept], moved)

    def see_update(self) -> None:
        """Observe the weights after the step, and the update."""
        before, self._before = self._before, []
        kept = [(p, then, _some(masters.local(p)).clone()) for p, then in before]
        self.after = [(p, now) for p, _, now in kept]
        kept = [(p, then, now) for p, then, now in kept if then.shape == now.shape]
        self._norms("sampled", [p for p, _, _ in kept], [then for _, then, _ in kept])
        moved = (
            _torch.tensors.each_sub([_wide(now) for *_, now in kept], [_wide(then) for _, then, _ in kept])
            if kept
            else []
        )
        self._norms("update", [p for p, _, _ in kept], moved)

    def _norms(self, name: str, params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        kinds: dict[Any, list[int]] = defaultdict(list)
        for index, tensor in enumerate(values):
            kinds[tensor.device, tensor.dtype].append(index)
        for (_, dtype), indices in kinds.items():
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            norms = _torch.tensors.each_norm([values[index] for index in indices], 2, wide)
            for index, norm in zip(indices, norms, strict=True):
                parameter = params[index]
                weight = self._weight(parameter)
                if name not in ("gradient", "weight"):
                    weight *= _flat(masters.local(parameter)).numel() / values[index].numel()
                self.numbers.append(Number(self._regions.get(id(parameter), ""), name, norm, weight))


def shares(numbers: Mapping[tuple[str, str], float], region: str) -> dict[str, float | None]:
    """Return the statistics of one module, as the fields of a :class:`~castwise.lab.watch.records.RegionSample`."""

    def of(name: str) -> float | None:
        return numbers.get((region, name))

    def ratio(above: str, below: str) -> float | None:
        over, under = of(above), of(below)
        return None if over is None or not under else over / under

    def root(value: float | None) -> float | None:
        return None if value is None else math.sqrt(value)

    small, zero, energy, count = of("small"), of("zero"), of("energy"), of("gradients")
    return {
        "grad_norm": root(of("gradient")),
        "weight_norm": root(of("weight")),
        "update_ratio": root(ratio("update", "sampled")),
        "drift": root(ratio("drift", "held")),
        "output": of("max_output"),
        "near_overflow": ratio("near", "outputs"),
        "zero": ratio("zero", "gradients"),
        "subnormal": None if small is None or zero is None or not count else (small - zero) / count,
        "lost_updates": ratio("lost", "moved"),
        "underflow": None if small is None or not count else small * _ROUNDING / energy if energy else 1.0,
    }
