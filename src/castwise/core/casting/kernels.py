"""Override how autocast casts an operator, by kernels that replace torch's own on the autocast dispatch key.

``torch.autocast`` applies its lists in C++ and offers no way to change a listed operator. An override is a Python
kernel that is registered for one operator on the autocast key of one device type. The kernel reads the active
:class:`~castwise.core.casting.frames.Frame` of the thread. If the frame has a rule for the operator, the kernel casts
by this rule. Otherwise it calls the kernel that was registered before. An override is registered only while a
:class:`Lease` on it is held, so nothing remains when the last plan that needs it is closed.

An override costs a few microseconds at each call of its operator under autocast. It costs nothing outside of autocast
and nothing on other operators.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from castwise.core import _torch
from castwise.core.casting import frames, tracing
from castwise.core.casting.attention import unfused_attention
from castwise.core.casting.backward import current_frame, inner_block, left_block
from castwise.core.casting.frames import Frame, left_blocks, thread
from castwise.core.plans.formats import LOW_DTYPES
from castwise.core.plans.rules import Row, advice, operator_overloads
from castwise.errors import BannedOperatorError

Action = Callable[[Any, str, "tuple[Any, ...]", "dict[str, Any]"], Any]


def eligible(value: Any, device_type: str) -> bool:
    """Whether a value is a tensor that autocast casts on a device type: a floating tensor there that is not fp64."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == device_type
    )


def _cast(value: Any, device_type: str, dtype: torch.dtype, to: Callable[..., Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return to(value, dtype) if value.dtype is not dtype and eligible(value, device_type) else value
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float, bool)):
        return [_cast(item, device_type, dtype, to) for item in value]
    return value


def _convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype)


def _convert_weight(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor, and cache the copy if the tensor is a trainable fp32 parameter.

    The copy is used until the parameter changes, an optimizer steps, or the active :class:`Frame` is left.
    """
    kept = thread.state.weights
    if kept is None or not (
        type(tensor) is torch.nn.Parameter
        and tensor.requires_grad
        and tensor.dtype is torch.float32
        and torch.is_autocast_cache_enabled()
    ):
        return tensor.to(dtype)
    key = (
        id(tensor),
        dtype,
        torch.is_grad_enabled(),
    )  # the entry keeps the tensor alive, so that its id is not reused
    age = (_torch.tensors.version(tensor), frames.steps)
    entry = kept.get(key)
    if entry is not None and entry[1] == age:
        copy: torch.Tensor = entry[2]
        return copy
    copy = tensor.to(dtype)
    if not _torch.dispatcher.in_transform():  # a transform's copy is valid at its level only
        kept[key] = (tensor, age, copy)
    return copy


def _run(op: Any, device: str, args: Any, kwargs: dict[str, Any], dtype: torch.dtype, to: Any) -> Any:
    with frames.suspended(device):
        args = [_cast(arg, device, dtype, to) for arg in args]
        if kwargs:
            kwargs = {name: _cast(arg, device, dtype, to) for name, arg in kwargs.items()}
        return op(*args, **kwargs)


def _lower(op: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _run(op, device, args, kwargs, torch.get_autocast_dtype(device), _convert_weight)


def _lower_if_any(op: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _floating_dtypes((*args, *kwargs.values()), device)
    return (_lower if found.intersection(LOW_DTYPES) else _as_is)(op, device, args, kwargs)


def _fp32(op: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _run(op, device, args, kwargs, torch.float32, _convert)


def _as_is(op: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with frames.suspended(device):
        return op(*args, **kwargs)


def _floating_dtypes(values: Iterable[Any], device: str) -> set[torch.dtype]:
    found: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            if eligible(value, device):
                found.add(value.dtype)
        elif isinstance(value, (list, tuple)):
            found |= _floating_dtypes(value, device)
    return found


def widest_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the narrowest dtype that holds every value of the given floating dtypes. For fp16 and bf16 it is fp32."""
    found: torch.dtype | None = None
    for dtype in dtypes:
        found = dtype if found is None else torch.promote_types(found, dtype)
    return found


def _widest(op: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _floating_dtypes((*args, *kwargs.values()), device)
    if len(found) < 2:
        return _as_is(op, device, args, kwargs)
    dtype = widest_dtype(found)
    assert dtype is not None
    return _run(op, device, args, kwargs, dtype, _convert)


def _widest_if_first(op: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (_as_is if args[0].dtype in LOW_DTYPES else _widest)(op, device, args, kwargs)


def _banned(row: Row) -> Action:
    def action(op: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = _floating_dtypes((*args, *kwargs.values()), device)
        if _torch.dispatcher.inside_operator() or (
            row.only_low and not any(dtype in LOW_DTYPES for dtype in found)
        ):
            return _as_is(op, device, args, kwargs)
        if row.message:
            raise BannedOperatorError(row.message)
        inputs = ", ".join(sorted(str(dtype) for dtype in found)) or "no floating tensors"
        raise BannedOperatorError(
            f"{op.name()} was called with {inputs} under a plan that bans it: {row.reason}. {advice(row.op)}"
        )

    return action


_parts: Any = object()
"""The action for an operator that is not cast itself, but calls other operators, which are cast by their own rules."""


def _unfused(op: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = _PARTS[op.name().partition("::")[2].partition(".")[0]]
    return _run(parts, device, args, kwargs, torch.get_autocast_dtype(device), _convert_weight)


_PARTS: dict[str, Callable[..., Any]] = {"scaled_dot_product_attention": unfused_attention}
_RULES: dict[str, Action] = {
    "lower": _lower, "fp32": _fp32, "as_is": _as_is, "widest": _widest, "unfused": _unfused,
}  # fmt: skip


_WHOLE_IN_FRONT: dict[str, Action] = {
    "binary_cross_entropy_with_logits": _fp32, "scaled_dot_product_attention": _lower,
}  # fmt: skip
"""Operators that torch casts in this way on every device, and that are cast as a whole before torch.func's transforms.

The transforms would decompose such an operator and cast each part again. One part is an ``exp_``, which a plan may ban.
Other parts are fp32 products, which would be cast to the low format below autograd."""


def actions(rows: Mapping[str, Row]) -> dict[str, Action]:
    """Return, for each overridden operator, the function that runs it by its rule.

    Args:
        rows: The operators' rules, as :func:`castwise.core.plans.rules.overrides` returns them.
    """
    out = {}
    for name, row in rows.items():
        if row.rule == "banned":
            out[name] = _banned(row)
        elif row.rule == "lower" and row.only_low:
            out[name] = _lower_if_any
        elif row.rule == "widest" and row.only_low:
            out[name] = _widest_if_first
        else:
            out[name] = _RULES[row.rule] if row.opaque else _parts
    return out


def frame_of(
    device_type: str,
    dtype: torch.dtype | None,
    rows: Mapping[str, Row] | None = None,
    *,
    surrounding: torch.dtype | None = None,
    cache: bool | None = None,
) -> Frame:
    """Create a :class:`Frame` for one device type. Frames with the same content get the same key and guard code.

    The arguments are the attributes of :class:`Frame`. Without ``dtype``, operators are not cast. The default of
    ``surrounding`` is ``dtype``, or fp32 without ``dtype``.
    """
    frames.watch_steps()
    rows = {} if dtype is None or rows is None else dict(rows)
    surrounding = surrounding or dtype or torch.float32
    content: list[object] = [device_type, str(dtype), str(surrounding), cache]
    content += sorted([row.op, row.rule, row.only_low, row.opaque, row.message] for row in rows.values())
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    frame = Frame(
        device_type, dtype, surrounding, rows, actions(rows), cache, key, tracing.code_for(key) if rows else 0
    )
    tracing.graph_frames[key] = frame
    return frame


def _pickled(frame: Frame) -> tuple[Any, ...]:
    remake = functools.partial(frame_of, surrounding=frame.surrounding, cache=frame.cache)
    return remake, (frame.device_type, frame.dtype, dict(frame.rows))


Frame.__reduce__ = _pickled  # type: ignore[method-assign,assignment]  # frames themselves know no kernels


def _kernel(op: Any, name: str, device_type: str) -> Callable[..., Any]:
    native = _torch.dispatcher.native_autocast_call(op, device_type)
    below = _torch.dispatcher.below_autocast_call(op, device_type)
    ambient = frames.ambient
    places, numbers = _torch.dispatcher.number_places(op), _torch.dispatcher.NUMBERS

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for place in places:
            if isinstance(args[place], numbers):
                return _torch.dispatcher.with_tensors(
                    lambda *given: kernel(keyset, *given, **kwargs), args, places
                )
        state = thread.state
        frame = state.frame if state.backward is None else current_frame()
        if frame is None:
            frame = left_block() or ambient.get(device_type)
        elif left_blocks and state.backward is None:
            frame = inner_block() or frame
        if frame is not None:
            action = frame.overrides.get(name)
            if action is _parts:
                return below(keyset, *args, **kwargs)
            if action is not None:
                return action(op, device_type, args, kwargs)
        return native(keyset, *args, **kwargs)

    return kernel


def _in_front(op: Any, name: str, go_on: Callable[..., Any]) -> Callable[..., Any]:
    """Return the override kernel of an operator for use inside torch.func, which casts once, before any transform.

    The kernel on the autocast key comes too late there. A transform decomposes some operators before autocast runs,
    such as ``linear`` and the operators that vmap replaces. Its lower levels restore the dispatch keys that were in
    force around the call.
    """
    places, numbers = _torch.dispatcher.number_places(op), _torch.dispatcher.NUMBERS
    otherwise = _WHOLE_IN_FRONT.get(name, _parts)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for place in places:
            if isinstance(args[place], numbers):
                return _torch.dispatcher.with_tensors(
                    lambda *given: kernel(keyset, *given, **kwargs), args, places
                )
        frame = current_frame()
        if frame is not None and torch.is_autocast_enabled(device := frame.device_type):
            action = frame.overrides.get(name, otherwise)
            if action is not _parts and _on(device, (*args, *kwargs.values())):
                return action(op, device, args, kwargs)
        return go_on(keyset, *args, **kwargs)

    return kernel


def _on(device_type: str, values: Iterable[Any]) -> bool:
    """Whether any tensor is on a device of this type, so that its autocast applies to the call."""
    return any(
        value.device.type == device_type
        if isinstance(value, torch.Tensor)
        else isinstance(value, (list, tuple)) and _on(device_type, value)
        for value in values
    )


_lock = threading.RLock()
_Key = tuple[str, str]
_registered: dict[_Key, tuple[list[Callable[[], None]], weakref.WeakSet[_Holder]]] = {}
"""The registered kernels: for each operator and device type, the functions that unregister them, and their live holders.

The device type "" stands for kernels in front of transforms of torch.func. Holders are referenced weakly, since an
interrupt can keep a holder from releasing its kernels."""


class _Holder:
    """An object that stands for a :class:`Lease` as the holder of kernels.

    A lease cannot be the holder itself, since its finalizer, which releases the kernels, must not refer to the lease.
    """


def _hold(key: _Key, holder: _Holder) -> None:
    entry = _registered.get(key)
    if entry is None or not entry[1]:
        _drop(key)
        entry = _registered[key] = _register(*key), weakref.WeakSet()
    entry[1].add(holder)
    if _registered.get(key) is not entry:  # in between, its last holder released it, in a signal handler
        _hold(key, holder)


def _drop(key: _Key) -> None:
    for function in _registered.get(key, ((), None))[0]:
        function()
    _registered.pop(key, None)


def _release(held: tuple[_Key, ...], holder: _Holder) -> None:
    """Unregister the kernels that a holder holds, unless another holder still holds them.

    May be repeated after an interrupt.
    """
    with _lock:
        for key in held:
            if key in _registered:
                holders = _registered[key][1]
                holders.discard(holder)
                if not holders:
                    _drop(key)


def registered(device_type: str) -> frozenset[str]:
    """Return the operators that have an override kernel registered now for a device type."""
    with _lock:
        return frozenset(name for name, device in _registered if device == device_type)


def _register(name: str, device_type: str) -> list[Callable[[], None]]:
    # Before torch.func transforms, arithmetic with a number calls the overload for two tensors.
    every = bool(device_type) or name not in _torch.dispatcher.NUMBERS_FOR_TENSORS
    return [
        _torch.dispatcher.register_autocast_kernel(op, device_type, _kernel(op, name, device_type))
        if device_type
        else _torch.dispatcher.register_in_front_of_transforms(op, functools.partial(_in_front, op, name))
        for op in operator_overloads(name)
        if _torch.dispatcher.is_dispatched(op) and (every or _torch.dispatcher.number_places(op))
    ]


class Lease:
    """Registers the override kernels of some operators on a device type, until it is closed or garbage-collected."""

    def __init__(self, names: Iterable[str], device_type: str) -> None:
        names = tuple(names)
        in_front = {
            *names,
            *_torch.dispatcher.NUMBERS_FOR_TENSORS,
            *_WHOLE_IN_FRONT,
        }  # one kernel for all devices
        held = (*((name, device_type) for name in names), *((name, "") for name in in_front))
        holder = _Holder()
        self.close = functools.partial(_release, held, holder)
        """Release the kernels. Does nothing if they were released before."""
        weakref.finalize(self, self.close).atexit = False
        with _lock:
            for key in held:
                _hold(key, holder)
