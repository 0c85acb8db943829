"""Functions of the user's own: decorators, and functions of modules registered before ``initialize``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from castwise.compat.apex.amp._amp_state import _amp_state

__all__ = [
    "float_function",
    "half_function",
    "patch",
    "patch_registered",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_registered: list[tuple[Any, str, Callable[[Any], Any]]] = []


def _floating(value: Any, device_type: str) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if (
            value.is_floating_point()
            and value.dtype is not torch.float64
            and value.device.type == device_type
        ):
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _floating(item, device_type)


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if any(True for _ in _floating(value, device_type)) else value
    if isinstance(value, (list, tuple)):
        items = [_cast(item, device_type, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _casting(function: _F, choose: Callable[[Any, Any], torch.dtype | None]) -> _F:
    """Cast the arguments and run the function with the casts of O1 on inside, as Apex does."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if handle is None or not handle.is_active():
            return function(*args, **kwargs)
        dtype = choose(handle, (args, tuple(kwargs.values())))
        if dtype is None:
            return function(*args, **kwargs)
        device_type = handle.device_type
        kwargs = {name: _cast(value, device_type, dtype) for name, value in kwargs.items()}
        return function(*_cast(args, device_type, dtype), **kwargs)

    return run  # type: ignore[return-value]


def half_function(fn: _F) -> _F:
    """Cast floating arguments to half (bf16 where O1 runs in it) while the casts of O1 are in force."""
    return _casting(fn, lambda handle, _: handle.dtype)


def float_function(fn: _F) -> _F:
    """Cast floating arguments to fp32 while the casts of O1 are in force."""
    return _casting(fn, lambda _handle, _values: torch.float32)


def promote_function(fn: _F) -> _F:
    """Cast floating arguments to the widest type among them while the casts of O1 are in force."""

    def choose(handle: Any, values: Any) -> torch.dtype | None:
        found = {tensor.dtype for tensor in _floating(values, handle.device_type)}
        return functools.reduce(torch.promote_types, found) if len(found) > 1 else None

    return _casting(fn, choose)


def _register(module: Any, name: str, decorator: Callable[[Any], Any]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"No function named {name} in module {module}.")
    if (module, name, decorator) not in _registered:
        _registered.append((module, name, decorator))


def register_half_function(module: Any, name: str) -> None:
    """Have the next ``initialize`` with O1 put :func:`half_function` around a function of a module or a class."""
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Have the next ``initialize`` with O1 put :func:`float_function` around a function of a module or a class."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Have the next ``initialize`` with O1 put :func:`promote_function` around a function of a module or a class."""
    _register(module, name, promote_function)


def patch(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Put ``value`` in the place of an attribute of a module or a class; ``undo`` puts back what stood there."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    if own is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, own)


def patch_registered(undo: ExitStack) -> None:
    """Put the registered decorators in place, until ``undo`` is closed. They stay registered for a later ``initialize``."""
    for module, name, decorator in _registered:
        own = vars(module).get(name)
        wrapped = decorator(getattr(module, name))
        static = isinstance(own, (staticmethod, classmethod))
        patch(module, name, staticmethod(wrapped) if static else wrapped, undo)
