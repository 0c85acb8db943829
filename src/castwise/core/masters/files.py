"""Masters in ``optimizer.state_dict()``, so that the usual two files of a loop hold the full training state.

A parameter's full values are an entry of its state, which torch loads, moves and shards like any other. An optimizer
without castwise accepts extra entries in state that is not empty, but if it has no ``step`` for a parameter, the state
must stay empty; for such a parameter the entry is in its group, by its position.

Loaded values wait in the optimizer until the first step: model and optimizer may be loaded in either order, and before
``prepare``. An element whose full value rounds to the model's value takes the full value; otherwise the model's is
used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from castwise.core.masters.originals import is_low, local, original_of, remember_original
from castwise.core.masters.parameter import Master, model_param_of
from castwise.core.plans.formats import LOW_DTYPES

_ENTRY = "castwise_master"
_given: Any = WeakTensorKeyDictionary()
"""Parameters that ``model.load_state_dict`` gave values since the last step, and how: stored ``"low"``, stored
``"wide"`` but rounded as the parameter is, or ``"full"``."""


def with_masters(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Add the full values of low parameters, sharing their memory, to a new ``optimizer.state_dict()``.

    Loaded values that still wait for the model's weights are included unchanged.
    """
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for place, (parameter, number) in enumerate(zip(group["params"], packed["params"], strict=True)):
            full = parameter.data if _is_master(parameter) else original_of(parameter)
            state = state_dict["state"].get(number)
            if full is None or f"{_ENTRY}.{place}" in packed or (state and _ENTRY in state):
                continue
            if state:
                state_dict["state"][number] = {**state, _ENTRY: full}
            else:
                packed[f"{_ENTRY}.{place}"] = full
    return state_dict


def without_masters(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """An ``optimizer.state_dict()`` without castwise's additions; the argument is not changed."""
    return {
        **state_dict,
        "state": {
            number: {k: v for k, v in state.items() if k != _ENTRY} if isinstance(state, Mapping) else state
            for number, state in state_dict["state"].items()
        },
        "param_groups": [
            {key: value for key, value in group.items() if not str(key).startswith(_ENTRY)}
            for group in state_dict["param_groups"]
        ],
    }


def _is_master(parameter: Any) -> bool:
    return isinstance(parameter, Master)


def _entries(optimizer: Optimizer) -> Iterator[tuple[Any, Tensor | None, dict[str, Any], str]]:
    """Each parameter of an optimizer, its loaded full values, and their position."""
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter) or {}
            where, key = (state, _ENTRY) if _ENTRY in state else (group, f"{_ENTRY}.{place}")
            yield parameter, where.get(key), where, key


def forget_loaded(optimizer: Optimizer) -> None:
    """Remove loaded masters from an optimizer."""
    for _, _, where, key in _entries(optimizer):
        where.pop(key, None)


class Loads:
    """The values that were loaded into an optimizer and into its model since the last step.

    Args:
        optimizer: An optimizer with masters.

    Attributes:
        waiting: Whether hooks have seen a load; :attr:`state` shows loads into the optimizer in any case.
        state: The ``id`` of the optimizer's state at the last check: every load, by any code, replaces the state.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.waiting = self._optimizers = False
        self._rounded = any(values is not None and is_low(values) for _, values, _, _ in _entries(optimizer))
        self.state = id(optimizer.state)

    def look(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer was loaded and has not stepped since, also if it was loaded before it was prepared."""
        found = any(values is not None for _, values, _, _ in _entries(optimizer))
        if found or id(optimizer.state) != self.state:
            self.waiting = self._optimizers = True
            self.state = id(optimizer.state)
        return self._optimizers

    def join(self, optimizer: Optimizer, pull: Callable[[], None], *, last: bool = False) -> None:
        """Synchronise masters, weights and loaded values.

        Args:
            optimizer: The optimizer of this object.
            pull: Synchronises masters and weights.
            last: A step follows at once, so nothing else will be loaded.
        """
        if self._optimizers:
            pull()
            count, other, missing, rounded = _merge(optimizer)
            pull()
            if last or (not other and (not missing or _all_given(optimizer))):
                self._optimizers, last = False, True
                if self._rounded:
                    warnings.warn(
                        f"prepare: this {type(optimizer).__name__} was loaded before prepare, and torch has rounded its state, fp32 "
                        "masters too, to the format of the model's weights. Call load_state_dict after prepare.",
                        stacklevel=5,
                    )
                    self._rounded = False
                _warn(type(optimizer).__name__, count, other, missing if rounded else 0)
        if last:
            self.waiting = False
            forget_loaded(optimizer)
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                _given.pop(model_param_of(parameter), None)


def note_load(parameter: Tensor, value: Tensor) -> None:
    """Record that ``model.load_state_dict`` gives a parameter this value."""
    value = local(value)
    _given[parameter] = "low" if is_low(value) else "wide" if _is_rounded(value, parameter.dtype) else "full"


def _all_given(optimizer: Optimizer) -> bool:
    """Whether ``load_state_dict`` of the model gave a value to every parameter of an optimizer that has a master."""
    held = (p for group in optimizer.param_groups for p in group["params"])
    return all(parameter.stored in _given for parameter in held if _is_master(parameter))


@torch.no_grad()
def _merge(optimizer: Optimizer) -> tuple[int, int, int, bool]:
    """Give masters the loaded full values that round to the model's values. Synchronises with the device.

    If the model's file held full values, the masters have them already.

    Returns:
        Four values: how many parameters have masters; how many masters differ from the loaded values; how many have no
        loaded value; and whether all of the latter hold only values of their low format.
    """
    count, other, missing, rounded = 0, 0, 0, True
    for parameter, loaded, _, _ in _entries(optimizer):
        stored = model_param_of(parameter)
        master: Any = parameter if _is_master(parameter) else original_of(stored)
        if master is None:
            continue
        count += _is_master(parameter)
        given = _given.get(stored)
        if given == "full":
            continue
        if loaded is None or loaded.shape != master.shape:
            if _is_master(parameter) and given != "wide":
                missing += 1
                rounded = rounded and _is_rounded(local(master), stored.dtype)
            continue
        values, low = local(loaded).to(local(master).device), local(stored)
        same = _rounds_to(values, low)
        every = bool(same.all())
        other += not every
        full = local(master)
        if not every or not torch.equal(full, values):
            full.copy_(values if every else torch.where(same, values, full))
        if not _is_master(parameter):
            remember_original(stored, master)
    return count, other, missing, rounded


def _warn(kind: str, count: int, other: int, missing: int) -> None:
    """Warn once about loaded values that do not match exactly."""
    if other:
        warnings.warn(
            f"{kind}.load_state_dict: the fp32 masters in the loaded state are not those of the model's weights, for {other} of "
            f"{count} parameters. The model's rounded values are used, so training does not resume bit for bit. "
            "Load model.state_dict() and optimizer.state_dict() that were saved at the same step.",
            stacklevel=5,
        )
    elif missing:
        warnings.warn(
            f"{kind}.load_state_dict: the loaded state has no fp32 masters, and the weights that were loaded are rounded, for {missing} "
            f"of {count} parameters. Training resumes from the rounded weights. State dicts of a prepared optimizer hold the "
            f"masters; "
            "amp.model_state_dict(model) and castwise.checkpoint save full weights.",
            stacklevel=5,
        )


def _rounds_to(values: Tensor, low: Tensor) -> Tensor:
    """Which elements are the unrounded form of low values; rounding may have gone through another low format."""
    same = torch.zeros_like(low, dtype=torch.bool)
    for way in dict.fromkeys((low.dtype, *LOW_DTYPES)):
        rounded = values.to(way).to(low.dtype)
        same |= (rounded == low) | (rounded.isnan() & low.isnan())
        if same.all():
            break
    return same


def _is_rounded(master: Tensor, dtype: torch.dtype) -> bool:
    return bool((master.to(dtype).to(master.dtype) == master).all())
