"""Casts around functions that the user names, by a decorator or by registering them before ``initialize``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, TypeVar

import torch

from castwise import fp32_function, lower_function
from castwise.bridges.compat.apex.amp._amp_state import _amp_state
from castwise.core.plans.rules import base_table

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


_ONE_OPERATOR = {"cross_entropy", "grid_sample", "interpolate", "softmin"}
"""Python functions of torch that call a single operator of Apex's cast lists, under another name."""


def _is_listed(function: Any) -> bool:
    """Whether a function may be on Apex's lists of torch functions to cast. The user's own functions are not."""
    if isinstance(function, (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)):
        return True
    name, home = (getattr(function, key, "") or "" for key in ("__name__", "__module__"))
    return home.partition(".")[0] == "torch" and (name in _ONE_OPERATOR or name in base_table("apex", "cpu"))


def _casting(
    function: _F,
    choose: Callable[[Any, Any], torch.dtype | None],
    alone: Callable[[_F], _F] | None = None,
) -> _F:
    """Return a function that casts its arguments, then calls ``function``, in which the casts of level ``O1`` stay active.

    Args:
        function: The function to decorate.
        choose: Called with the :class:`AmpHandle` and the arguments; returns the dtype, or None for no cast.
        alone: The decorator to use instead if the function may be on Apex's lists of torch functions to cast. These lists
            then do not apply inside the function.
    """
    listed = alone(function) if alone is not None and _is_listed(function) else None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        handle = _amp_state.handle
        if handle is None or not handle.is_active():
            return function(*args, **kwargs)
        if listed is not None:
            return listed(*args, **kwargs)
        dtype = choose(handle, (args, tuple(kwargs.values())))
        if dtype is None:
            return function(*args, **kwargs)
        device_type = handle.device_type
        kwargs = {name: _cast(value, device_type, dtype) for name, value in kwargs.items()}
        return function(*_cast(args, device_type, dtype), **kwargs)

    return run  # type: ignore[return-value]


def half_function(fn: _F) -> _F:
    """Decorate a function so that its floating arguments are cast to fp16 while the casts of level ``O1`` are active.

    If ``O1`` casts to bf16, the arguments are cast to bf16. A torch function then runs in that format even if Apex's
    lists say otherwise.

    Args:
        fn: The function to decorate.
    """
    return _casting(fn, lambda handle, _: handle.dtype, lower_function)


def float_function(fn: _F) -> _F:
    """Decorate a function so that its floating arguments are cast to fp32 while the casts of level ``O1`` are active.

    A torch function then runs in fp32 even if Apex's lists say otherwise.

    Args:
        fn: The function to decorate.
    """
    return _casting(fn, lambda _handle, _values: torch.float32, fp32_function)


def promote_function(fn: _F) -> _F:
    """Decorate a function so that its floating arguments are cast to the widest dtype among them.

    The casts are made while the casts of level ``O1`` are active. Operators inside the function still follow Apex's
    lists.

    Args:
        fn: The function to decorate.
    """

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
    """Make the next ``initialize`` with O1 decorate a function by :func:`half_function`.

    Args:
        module: The module or the class that has the function.
        name: The name of the function.
    """
    _register(module, name, half_function)


def register_float_function(module: Any, name: str) -> None:
    """Make the next ``initialize`` with O1 decorate a function by :func:`float_function`.

    Args:
        module: The module or the class that has the function.
        name: The name of the function.
    """
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Make the next ``initialize`` with O1 decorate a function by :func:`promote_function`.

    Args:
        module: The module or the class that has the function.
        name: The name of the function.
    """
    _register(module, name, promote_function)


def patch(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Replace an attribute of a module or a class by ``value``, until ``undo`` is closed."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    if own is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, own)


def patch_registered(undo: ExitStack) -> None:
    """Decorate the registered functions, until ``undo`` is closed. They stay registered for a later ``initialize``."""
    for module, name, decorator in _registered:
        wrapped = decorator(getattr(module, name))
        static = isinstance(inspect.getattr_static(module, name, None), (staticmethod, classmethod))
        patch(module, name, staticmethod(wrapped) if static else wrapped, undo)
