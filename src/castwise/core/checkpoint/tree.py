"""Convert nested values to JSON and back. The tensors among them are stored separately, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from castwise.core.plans.text import nested_deeper
from castwise.errors import CheckpointError

_DEEPEST = 60
_LARGEST = 10**4000
"""The limit for integers. Python parses no integer of more than 4,300 digits."""


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a nested value as JSON, from which :func:`decode` also restores tuples and the key types of dicts.

    Args:
        value: None, bool, int, float, str, a tensor, or a list, tuple or dict of these.
        name: Name of the value, with which the names of its tensors begin.
        tensors: The tensors inside the value are added to this dict, under their names.

    Raises:
        CheckpointError: The value has another type, could not be read again, or two tensors would have one name.
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


def check(value: Any, tensors: Mapping[str, Any]) -> None:
    """Check that untrusted JSON can be a result of :func:`encode`, and refers only to tensors in ``tensors``.

    Raises:
        ValueError: The check failed. The message says why.
    """
    try:
        decode(value, tensors.__getitem__)
    except KeyError:
        raise ValueError("a tensor that was not saved") from None


def decode(value: Any, fetch: Callable[[str], Any]) -> Any:
    """Convert JSON that :func:`encode` returned back to the nested value.

    Args:
        value: The JSON.
        fetch: Called with the name of each tensor. Returns the tensor, or an object to use in its place.

    Raises:
        ValueError: The JSON is not a result of :func:`encode`.
    """
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items() if len(value) == 1 else [("", None)]
    if kind == "tensor" and isinstance(inside, str):
        return fetch(inside)
    if kind == "tuple" and isinstance(inside, list):
        return tuple(decode(inside, fetch))
    if kind != "dict" or not isinstance(inside, list):
        raise ValueError("a value of unknown kind")
    mapping: dict[Any, Any] = {}
    for pair in inside:
        if not isinstance(pair, list) or len(pair) != 2 or not _is_key(pair[0]):
            raise ValueError("a mapping that does not consist of keys and values")
        mapping[decode(pair[0], fetch)] = decode(pair[1], fetch)
    if len(mapping) < len(inside):
        raise ValueError("a mapping with a duplicate key")
    return mapping


def _is_key(key: Any) -> bool:
    parts = key["tuple"] if isinstance(key, dict) and key.keys() == {"tuple"} else [key]
    return isinstance(parts, list) and not any(isinstance(part, (list, dict)) for part in parts)


def names_of(value: Any) -> list[str]:
    """Return the names of the tensors that occur in a result of :func:`encode`."""
    found: list[str] = []
    decode(value, found.append)
    return found
