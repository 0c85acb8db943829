"""Trace non-finite values to their origins, from operator to operator.

An operator with finite inputs and a non-finite output is an *origin*. A non-finite output of any other operator
inherits the origins of the operator's non-finite inputs. An infinity that is written in the program (a mask of -inf) is
*given* and no fault; an operator that turns such an infinity into NaN is a new origin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting.trees import map_tensors, tensors_in
from castwise.lab.inspect.causes import Why, distinct, explain
from castwise.lab.inspect.causes import written as written_by
from castwise.lab.inspect.trace import OperatorRun, Trace
from castwise.lab.inspect.values import has_nan, is_finite, is_floating, mend_, plain
from castwise.lab.passes.observers import Args, Kwargs, Run

Kind = Literal["operator", "data", "parameter", "buffer", "constant", "memory", "unseen"]
"""What produced non-finite values: an operator; the caller's data; a parameter; a buffer; a constant in the program;
uninitialised memory; or code whose operators torch does not expose."""

_EXPLAINED = 32
"""Maximum number of origins whose cause is determined."""
_ALLOCATES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_"})  # fmt: skip
_OVERWRITES = frozenset({
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "set_",
    "resize_",
    "exponential_",
})
"""In-place operators whose result is independent of the previous contents."""


@dataclass(eq=False)
class Origin:
    """The origin of non-finite values, such as an operator or a parameter.

    Attributes:
        kind: What produced the values.
        name: Name of the data, the parameter or the buffer.
        place: Place of the operator, or of the first reader if no operator produced the values.
        nan: Whether the values are NaN; otherwise they are infinities.
        given: Whether the program appears to intend the values.
        why: Cause derived from the operator's inputs.
        nan_place: Where an infinity first became NaN.
        modules: Modules that the values passed through, in order.
    """

    kind: Kind
    name: str = ""
    place: OperatorRun | None = None
    nan: bool = False
    given: bool = False
    why: Why | None = None
    nan_place: OperatorRun | None = None
    modules: list[str] = field(default_factory=list)

    @property
    def key(self) -> int | str:
        """A key that is the same in all passes of one search: the index of the operator, or the name of the data or parameter."""
        if self.kind in ("data", "parameter", "buffer"):
            return f"{self.kind} {self.name}"
        return self.place.index if self.place is not None else self.name


class OriginTrace(Trace):
    """Observes a forward and backward pass, and traces non-finite values to their origins.

    Args:
        model: The model, before it runs.
        batch: The batch that the loss receives.
        mended: Keys of origins whose non-finite results are replaced by finite values.

    Attributes:
        origins: All origins found, in order.
    """

    def __init__(self, model: nn.Module, batch: Any, mended: frozenset[int | str] = frozenset()) -> None:
        super().__init__()
        self.origins: list[Origin] = []
        self._explained = 0
        self._mended = mended
        self._from: dict[Any, tuple[Origin, ...]] = {}
        self._names: dict[Any, tuple[Kind, str]] = {}
        self._given_by_name(model, batch)

    def origins_of(self, tensor: Tensor) -> tuple[Origin, ...]:
        """Return the origins of a tensor's non-finite values, in order."""
        return self._from.get(_torch.tensors.memory_of(plain_memory(tensor)), ())

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of the parameter, buffer or batch entry whose memory a tensor uses; empty for other tensors."""
        kind, name = self._names.get(_torch.tensors.memory_of(plain_memory(tensor)), ("", ""))
        return name if kind == "data" else f"{kind} {name}".strip()

    def _given_by_name(self, model: nn.Module, batch: Any) -> None:
        parts: list[tuple[Kind, str, Tensor]] = [("data", name, t) for name, t in named_tensors(batch)]
        parts += [("buffer", name, buffer) for name, buffer in model.named_buffers()]
        parts += [("parameter", name, parameter) for name, parameter in model.named_parameters()]
        for kind, name, tensor in parts:
            memory = _torch.tensors.memory_of(plain_memory(tensor))
            self._names[memory] = kind, name
            if not is_floating(tensor) or is_finite(tensor):
                continue
            origin = Origin(kind, name, nan=has_nan(tensor), given=kind != "parameter" and is_mask(tensor))
            if origin.key in self._mended:
                mend_(tensor)
                continue
            self.origins.append(origin)
            self._from[memory] = (*self._from.get(memory, ()), origin)

    def operator(self, run: Run, op: _torch.operators.OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator, and record where non-finite values in its results come from."""
        place = self.place(op)
        written = written_by(op, args, kwargs)
        overwrites = place.operator in _OVERWRITES or _torch.operators.overload_kind(op) == "out"
        # tensors that the operator writes to must be examined before it runs
        before = {} if overwrites else {id(t): self._state(t, place) for t in written if not is_finite(t)}
        copies = {} if overwrites else {id(t): t.detach().clone() for t in written}
        out = run(op, args, kwargs)
        made = distinct([*tensors_in(out), *written])
        bad = [tensor for tensor in made if not is_finite(tensor)]
        if self._from or bad:
            for tensor in made:
                if all(tensor is not other for other in bad):
                    self._forget(tensor)
        if not bad:
            return out
        if place.index in self._mended:
            return self._mend(out, tensors_in((args, kwargs)), written, bad)
        origins = self._origins(place, args, kwargs, written, before, bad)
        if (
            any(origin.place is place and origin.why is None for origin in origins)
            and self._explained < _EXPLAINED
        ):
            self._explained += 1
            if overwrites:
                copies = {id(t): torch.zeros_like(t) for t in written}
            before_args, before_kwargs = map_tensors(lambda t: copies.get(id(t), t), (args, kwargs))
            why = explain(op, place, before_args, before_kwargs, made, self.name_of, overwrites=overwrites)
            for origin in origins:
                origin.why = why if origin.place is place else origin.why
        return out

    def _mend(self, out: Any, inputs: list[Tensor], written: list[Tensor], bad: list[Tensor]) -> Any:
        """Replace non-finite values in an operator's results by finite values, and return the results.

        Results that are views of the inputs are copied first, so that the inputs stay as they are.
        """
        there = {
            _torch.tensors.memory_of(plain_memory(t)) for t in inputs if all(t is not w for w in written)
        }
        for tensor in bad:
            if _torch.tensors.memory_of(plain_memory(tensor)) not in there:
                mend_(tensor)
                self._forget(tensor)

        def replaced(tensor: Tensor) -> Tensor:
            if not is_floating(tensor) or is_finite(tensor):
                return tensor
            tensor = tensor.detach().clone()
            mend_(tensor)
            return tensor

        return map_tensors(replaced, out)

    def _origins(
        self,
        place: OperatorRun,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
        before: dict[int, tuple[bool, tuple[Origin, ...]]],
        bad: list[Tensor],
    ) -> tuple[Origin, ...]:
        inputs = [t for t in distinct(tensors_in((args, kwargs))) if all(t is not w for w in written)]
        spoilt = [t for t in inputs if not is_finite(t)]
        # batch norm writes to its statistics undeclared: they count as results if they were finite
        hidden = [t for t in spoilt if self._was_finite(t)]
        came = [self._state(t, place) for t in spoilt if all(t is not h for h in hidden)]
        came += list(before.values())
        nan = any(has_nan(tensor) for tensor in bad)
        nan_before = any(had_nan for had_nan, _ in came)
        origins = _together(found for _, found in came)
        if place.operator in _ALLOCATES:
            origins = (self._new(Origin("memory", place=place, nan=nan, given=True)),)
        elif not came:
            literal = not _is_finite_number((args, kwargs))
            kind: Kind = "constant" if literal else "operator"
            origins = (self._new(Origin(kind, place=place, nan=nan, given=literal and not nan)),)
        elif nan and not nan_before and all(origin.given for origin in origins):
            origins = (self._new(Origin("operator", place=place, nan=True)),)
        for origin in origins:
            if nan and not nan_before and origin.nan_place is None and not origin.nan:
                origin.nan_place = place
            if place.phase != "backward" and place.inside and origin.modules[-1:] != [place.module]:
                origin.modules.append(place.module)
        for tensor in (*bad, *hidden):
            memory = _torch.tensors.memory_of(plain_memory(tensor))
            same = self._from.get(memory, ()) if any(tensor is w for w in written) else ()
            self._from[memory] = _together([same, origins])
        return origins

    def _was_finite(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, a buffer or part of the batch, and was finite until now."""
        memory = _torch.tensors.memory_of(plain_memory(tensor))
        return memory in self._names and memory not in self._from

    def _new(self, origin: Origin) -> Origin:
        self.origins.append(origin)
        return origin

    def _state(self, tensor: Tensor, place: OperatorRun) -> tuple[bool, tuple[Origin, ...]]:
        """Return whether a non-finite tensor contains NaN, and the origins of its non-finite values."""
        memory, nan = _torch.tensors.memory_of(plain_memory(tensor)), has_nan(tensor)
        found = self._from.get(memory)
        if found is None:
            constant = place.operator == "lift_fresh"
            kind: Kind = "constant" if constant else "unseen"
            origin = Origin(kind, place=place, nan=nan, given=constant and is_mask(tensor))
            self.origins.append(origin)
            found = self._from[memory] = (origin,)
        return nan, found

    def _forget(self, tensor: Tensor) -> None:
        """Discard the recorded origins of a tensor that is finite now, if the tensor fills its storage."""
        held = plain_memory(tensor)
        if held.numel() * held.element_size() >= held.untyped_storage().nbytes():
            self._from.pop(_torch.tensors.memory_of(held), None)


def named_tensors(value: Any, path: str = "batch") -> Iterable[tuple[str, Tensor]]:
    """Yield the tensors of a batch with the expressions that access them, such as ``batch['x']``."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict) or hasattr(value, "items"):
        for key, part in value.items():
            yield from named_tensors(part, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for at, part in enumerate(value):
            yield from named_tensors(part, f"{path}[{at}]")
    else:
        for at, tensor in enumerate(tensors_in(value)):
            yield f"{path}, tensor {at}", tensor


def plain_memory(tensor: Tensor) -> Tensor:
    """Return a dense tensor that holds the values of a tensor in memory.

    For a sharded tensor that is this rank's part, and for a sparse tensor the tensor of its values.
    """
    if hasattr(tensor, "device_mesh"):
        tensor = _torch.distributed.local_tensor(tensor)
    return tensor if tensor.layout is torch.strided else plain(tensor)


def is_mask(tensor: Tensor) -> bool:
    """Whether a non-finite tensor looks like a mask: it contains -inf and at most two different finite values."""
    with torch.no_grad():
        values = plain(tensor)
        if bool((torch.isnan(values) | torch.isposinf(values)).any()):
            return False
        return int(torch.unique(values[torch.isfinite(values)]).numel()) <= 2


def _together(many: Iterable[tuple[Origin, ...]]) -> tuple[Origin, ...]:
    return tuple(dict.fromkeys(origin for origins in many for origin in origins))


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite_number, value))
    if isinstance(value, dict):
        return all(map(_is_finite_number, value.values()))
    return True
