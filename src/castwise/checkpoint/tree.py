"""Nested values as JSON, with the tensors among them put aside under names."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from torch import Tensor

from castwise.errors import CheckpointError
from castwise.plans.text import nested_deeper

__all__ = ["check", "decode", "encode", "names_of"]

_DEEPEST = 60
_LARGEST = 10**4000
"""Python reads no number of more than 4,300 digits."""


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON.

    Args:
        value: None, bool, int, float, str, a tensor, or lists, tuples and dicts of these. Dict keys are no tensors.
        name: Of the value; tensors inside get names that begin with it.
        tensors: Where tensors are put, by name.

    Returns:
        What ``json`` can write and :func:`decode` undoes; tuples stay tuples and dict keys keep their type.

    Raises:
        CheckpointError: A value of any other type, one that could not be read again, or two tensors with one name.
    """
    if nested_deeper(value, _DEEPEST):
        raise CheckpointError(
            f"save: {name} is nested more than {_DEEPEST} levels deep. Save it in a flatter form."
        )
    return _encode(value, name, tensors)


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise CheckpointError(
            f"save: {name} is a number of more than 4,000 digits. Save it as text in base 16."
        )
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
                [_encode(key, name, tensors), _encode(item, f"{name}.{key}", tensors)]
                for key, item in value.items()
            ]
        }
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
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


def check(value: Any, tensors: Container[str]) -> None:
    """Refuse what :func:`encode` does not return.

    Args:
        value: JSON that anybody may have written, of few levels.
        tensors: The names that there are.

    Raises:
        ValueError: It is something else; a clause says what.
    """
    if isinstance(value, list):
        for item in value:
            check(item, tensors)
    elif isinstance(value, dict):
        match value:
            case {"tensor": str(name), **rest} if not rest and name in tensors:
                pass
            case {"tuple": list(items), **rest} if not rest:
                check(items, tensors)
            case {"dict": list(pairs), **rest} if not rest:
                for pair in pairs:
                    if not isinstance(pair, list) or len(pair) != 2 or not _is_key(pair[0]):
                        raise ValueError("a mapping that is not of keys and values")
                    check(pair[1], tensors)
                if len({_plain(key) for key, _ in pairs}) < len(pairs):
                    raise ValueError("a mapping that gives a key twice")
            case _:
                raise ValueError("a value of unknown kind, or a tensor that is not there")


def _is_key(key: Any) -> bool:
    parts = key["tuple"] if isinstance(key, dict) and key.keys() == {"tuple"} else [key]
    return isinstance(parts, list) and not any(isinstance(part, (list, dict)) for part in parts)


def _plain(key: Any) -> Any:
    return tuple(key["tuple"]) if isinstance(key, dict) else key


def decode(value: Any, fetch: Callable[[str], Any]) -> Any:
    """Undo :func:`encode`.

    Args:
        value: What it returned.
        fetch: What is to stand for the tensor of a name: that tensor, or what is known of it.
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
