"""Optimizers inside other optimizers, such as the one inside SAM, inside Lookahead or several in one object."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from castwise.core.scaler import gradients


def inside(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers inside an optimizer, at any depth, that update some of its parameters."""
    own, found = set(map(id, gradients.stored(optimizer))), [optimizer]
    for outer in found:
        found += [
            each
            for each in _referenced(outer)
            if all(each is not known for known in found)
            and not own.isdisjoint(map(id, gradients.stored(each)))
        ]
    return found[1:]


def _referenced(outer: Optimizer) -> list[Optimizer]:
    """Return the optimizers in an optimizer's attributes: by themselves, in containers, in plain objects, and behind functions."""
    seen: dict[int, Any] = {}
    waiting = [
        value for name, value in vars(outer).items() if name not in ("state", "param_groups", "defaults")
    ]
    while waiting:
        value = waiting.pop()
        if type(value) in _ATOMS or id(value) in seen or _is_ours(value) or isinstance(value, _OTHER):
            continue
        seen[id(value)] = value
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting += value
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args]
        elif isinstance(value, types.MethodType):
            waiting.append(value.__self__)
        elif isinstance(value, types.FunctionType):
            waiting += inspect.getclosurevars(value).nonlocals.values()
        elif not isinstance(value, Optimizer):
            waiting += getattr(value, "__dict__", {}).values()
    return [each for each in seen.values() if isinstance(each, Optimizer)]


_ATOMS = frozenset({bool, bytes, float, int, str, type(None), weakref.ref})
_OTHER = (type, nn.Module, torch.Tensor, types.ModuleType)


def _is_ours(value: Any) -> bool:
    """Whether a value is a hook by which castwise follows an optimizer, or belongs to one: with masters, these are large."""
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__")).startswith("castwise.core.")
    return type(value).__module__.startswith("castwise.core.")
