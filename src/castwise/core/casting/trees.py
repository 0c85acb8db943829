"""Find, cast, move and map the tensors in nested arguments and results of modules."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.rnn import PackedSequence

from castwise.core import _torch

_LEAVES = (str, bytes, int, float, bool, type)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``function`` to every tensor inside ``value`` and return the result, in which all else is unchanged.

    Tuples, named tuples, lists, mappings, dataclasses and packed sequences are traversed, but not sets. Mappings
    include read-only ones and Hugging Face's ``ModelOutput``. A container is never modified. If a tensor in it
    changed, a new container of the same type is built, without calling its constructor. A container that occurs twice
    is rebuilt once, so that cycles and shared parts are preserved.

    Args:
        function: Takes a tensor and returns its replacement, or the very same tensor if nothing is to be changed.
        value: Any object.

    Returns:
        An object with the same structure, or the very same object if nothing changed.

    Warns:
        UserWarning: A container cannot be rebuilt. It is returned unchanged.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    new = _map(function, value, {} if _torch.dynamo.TRACES_IDENTITY or not is_dynamo_compiling() else None)
    return value if new is None else new


def _map(
    function: Callable[[torch.Tensor], torch.Tensor], value: Any, seen: dict[int, list[Any]] | None
) -> Any:
    """Return what :func:`map_tensors` returns for ``value``, or None if nothing changed.

    Args:
        function: As for :func:`map_tensors`.
        value: As for :func:`map_tensors`.
        seen: Maps the id of each container to the container and its result, which is None until it is known. ``seen``
            itself is None while a Dynamo traces that cannot tell containers apart. A shared container is then rebuilt
            each time it occurs, and cycles do not compile anyway.
    """
    if isinstance(value, torch.Tensor):
        cast = function(value)
        return None if cast is value else cast
    if value is None or isinstance(value, _LEAVES):
        return None
    if isinstance(value, PackedSequence):
        data = function(value.data)
        if data is value.data:
            return None
        return PackedSequence(data, value.batch_sizes, value.sorted_indices, value.unsorted_indices)
    parts = contents(value)
    if parts is None:
        return None
    known = None if seen is None else seen.get(id(value))
    if known is not None:
        if known[1] is None:  # a cycle: inner containers will refer to the result of this container
            if _is_fixed(value):
                return None
            new = _rebuilt(value, {})
            known[1] = value if new is None else new
        return None if known[1] is value else known[1]
    known = [value, None]
    if seen is not None:
        seen[id(value)] = known
    changed = {}
    for key, item in parts:
        new = _map(function, item, seen)
        if new is not None:
            changed[key] = new
    if known[1] is None:
        new = _rebuilt(value, changed) if changed else None
        known[1] = value if new is None else new
        return new
    if known[1] is value:
        return None
    _fill(known[1], changed)
    return known[1]


def contents(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the contents of a container with their indices, keys or field names, or None for any other value."""
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return None


def _rebuilt(value: Any, changed: dict[Any, Any]) -> Any:
    """Return a container of the same type with some contents replaced. If that fails, warn and return None."""
    try:
        if isinstance(value, tuple):
            items = [changed.get(index, item) for index, item in enumerate(value)]
            if type(value) is tuple:
                return tuple(items)
            return _rebuilt_tuple(value, items)
        if _is_fixed(value):
            return type(value)({**value, **changed})
        out = _copied(value)
        _fill(out, changed)
    except Exception as error:  # a container's methods may raise anything
        kind = type(value).__name__
        warnings.warn(
            f"castwise: a {kind} cannot be rebuilt ({type(error).__name__}: {error}), so the tensors in it are not cast. Pass "
            f"or return a tuple, a list or a dict in place of the {kind}.",
            stacklevel=2,
        )
        return None
    return out


def _rebuilt_tuple(value: Any, items: list[Any]) -> Any:
    """Rebuild a tuple subclass, whose ``__new__`` may take other arguments than its items."""
    try:
        out = tuple.__new__(type(value), items)
    except TypeError:  # types such as torch.return_types can only be created by their constructor
        return type(value)(items)
    if hasattr(value, "__dict__"):
        vars(out).update(vars(value))
    return out


def _is_fixed(value: Any) -> bool:
    """Whether a container is immutable."""
    return isinstance(value, tuple) or (isinstance(value, Mapping) and not hasattr(value, "__setitem__"))


def _copied(value: Any) -> Any:
    if type(value) in (list, dict):
        return type(value)(value)  # Dynamo can trace this
    try:
        return copy.copy(value)
    except (
        dataclasses.FrozenInstanceError
    ):  # frozen, with manual slots: copy would set them through __setattr__
        out = object.__new__(type(value))
        _fill(out, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        return out


def _fill(container: Any, changed: dict[Any, Any]) -> None:
    if isinstance(container, (list, Mapping)):
        for key, item in changed.items():
            container[key] = item  # type: ignore[index]
    else:
        for name, item in changed.items():
            object.__setattr__(container, name, item)


def map_arguments(
    function: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``function`` to every tensor in the arguments of a call, as :func:`map_tensors` does.

    This is fast in the usual case of a single tensor.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        new = function(args[0])
        return (args if new is args[0] else (new,)), kwargs
    return map_tensors(function, args), map_tensors(function, kwargs)


def cast_floating(value: Any, dtype: torch.dtype, only: tuple[torch.dtype, ...] | None = None) -> Any:
    """Cast the floating tensors inside ``value`` to ``dtype``. With ``only``, just tensors of these dtypes are cast.

    Returns:
        An object with the same structure, or the very same object if nothing had to be cast.
    """
    return map_tensors(floating_to(dtype, only), value)


def floating_to(
    dtype: torch.dtype, only: tuple[torch.dtype, ...] | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that casts one tensor as :func:`cast_floating` casts all."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is dtype or not tensor.is_floating_point():
            return tensor
        if only is not None and tensor.dtype not in only:
            return tensor
        return tensor.to(dtype)

    return convert


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside ``value`` as a list, in the order in which :func:`map_tensors` visits them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors inside ``value`` to a device, and return the very same object if nothing had to be moved."""
    return map_tensors(lambda tensor: tensor.to(device), value)
