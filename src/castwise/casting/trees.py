"""Cast the floating tensors in whatever a module takes or returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["cast_floating", "map_tensors"]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``function`` to every tensor inside ``value``; anything else passes as it is.

    Goes through tuples, named tuples, lists, sets left alone, mappings (Hugging Face's ``ModelOutput`` among
    them), dataclasses and packed sequences. Containers are rebuilt only where a tensor in them changed, with
    their own type, and never modified.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if value is None or isinstance(value, (str, bytes, int, float, bool)):
        return value
    if isinstance(value, PackedSequence):
        data = function(value.data)
        if data is value.data:
            return value
        return PackedSequence(data, value.batch_sizes, value.sorted_indices, value.unsorted_indices)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        if type(value) in (tuple, list):
            return type(value)(items)
        return type(value)(items)
    if isinstance(value, Mapping):
        changed = {}
        for key, item in value.items():
            new = map_tensors(function, item)
            if new is not item:
                changed[key] = new
        if not changed:
            return value
        out: Any = copy.copy(value)
        for key, item in changed.items():
            out[key] = item
        return out
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            new = map_tensors(function, item)
            if new is not item:
                fields[field.name] = new
        if not fields:
            return value
        record: Any = copy.copy(value)
        for name, item in fields.items():
            object.__setattr__(record, name, item)
        return record
    return value


def cast_floating(value: Any, dtype: torch.dtype, only: tuple[torch.dtype, ...] | None = None) -> Any:
    """Cast the floating tensors in ``value`` to ``dtype``.

    Args:
        value: Tensor or container of tensors; integer, boolean and complex tensors are left alone.
        dtype: Floating dtype to cast to.
        only: Cast these dtypes and no others.

    Returns:
        The same structure; the very same object where nothing had to be cast.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is dtype or not tensor.is_floating_point():
            return tensor
        if only is not None and tensor.dtype not in only:
            return tensor
        return tensor.to(dtype)

    if isinstance(value, torch.Tensor):
        return convert(value)
    return map_tensors(convert, value)
