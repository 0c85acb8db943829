"""Nested values as JSON, with the tensors among them put aside under names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from castwise.errors import CheckpointError

__all__ = ["decode", "encode", "names_of"]


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON.

    Args:
        value: None, bool, int, float, str, a tensor, or lists, tuples and dicts of these. Dict keys are no tensors.
        name: Of the value; tensors inside get names that begin with it.
        tensors: Where tensors are put, by name.

    Returns:
        What ``json`` can write and :func:`decode` undoes; tuples stay tuples and dict keys keep their type.

    Raises:
        CheckpointError: A value of any other type, or two tensors with one name.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if name in tensors:
            raise CheckpointError(f"save: two tensors would both be named {name!r}; rename one of the keys")
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, Mapping):
        for key in value:
            _check_key(key, name)
        return {
            "dict": [
                [encode(key, name, tensors), encode(item, f"{name}.{key}", tensors)]
                for key, item in value.items()
            ]
        }
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise CheckpointError(
        f"save: {name} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved. Allowed: None, bool, "
        "int, float, str, tensors, and lists, tuples and dicts of these. Save its state_dict() or its fields instead."
    )


def _check_key(key: Any, name: str) -> None:
    parts = key if isinstance(key, tuple) else (key,)
    if not all(part is None or isinstance(part, (bool, int, float, str)) for part in parts):
        raise CheckpointError(
            f"save: {name} has a key of type {type(key).__qualname__}. Allowed: None, bool, int, float, str, tuples of these."
        )


def decode(value: Any, fetch: Callable[[str], Tensor]) -> Any:
    """Undo :func:`encode`.

    Args:
        value: What it returned.
        fetch: The tensor of a name.
    """
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return fetch(value["tensor"])
    if "tuple" in value:
        return tuple(decode(item, fetch) for item in value["tuple"])
    return {decode(key, fetch): decode(item, fetch) for key, item in value["dict"]}


def names_of(value: Any) -> Iterator[str]:
    """The names of the tensors in what :func:`encode` returned."""
    if isinstance(value, list):
        for item in value:
            yield from names_of(item)
    elif isinstance(value, dict):
        if "tensor" in value:
            yield value["tensor"]
        for items in (value.get("tuple"), value.get("dict")):
            yield from names_of(items)
