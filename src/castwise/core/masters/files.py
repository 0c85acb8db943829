"""Store fp32 masters in ``optimizer.state_dict()``.

Together with ``model.state_dict()`` it then holds the full training state.

The fp32 values of a parameter are an additional entry of its optimizer state, which torch loads, moves and shards
like any other entry. An optimizer without castwise accepts additional entries in state that is not empty. But state
must stay empty if the optimizer has not stepped the parameter. The entry is then stored in the parameter group, by
the parameter's position.

Model and optimizer may be loaded in either order, and before ``prepare``. So loaded fp32 values are kept in the
optimizer until the first step. An element of a master takes the loaded fp32 value if that rounds to the model's
value. Otherwise it takes the model's value.
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
"""How precise the values are that ``model.load_state_dict`` gave to parameters since the last step.

``"low"``: the values were in bf16 or fp16. ``"wide"``: they were in a wider format, but rounded to the parameter's format.
``"full"``: they were not rounded."""


def with_masters(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Add the fp32 values of bf16 and fp16 parameters to a result of ``optimizer.state_dict()``, and return it.

    The values share the memory of fp32 masters, or of the original values that are kept for parameters without
    masters. fp32 values that were loaded and that no master has taken over yet are already in the result, and stay
    unchanged.
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
    """Return a copy of an ``optimizer.state_dict()`` without the entries that castwise adds."""
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
    """Yield each parameter of an optimizer, its loaded fp32 values or None, and the dict and key that hold the values."""
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter) or {}
            where, key = (state, _ENTRY) if _ENTRY in state else (group, f"{_ENTRY}.{place}")
            yield parameter, where.get(key), where, key


def forget_loaded(optimizer: Optimizer) -> None:
    """Remove from an optimizer the fp32 values of parameters that it has loaded from a state dict with fp32 masters."""
    for _, _, where, key in _entries(optimizer):
        where.pop(key, None)


class Loads:
    """Tracks whether an optimizer or its model was loaded since the last step, and gives fp32 masters the loaded values.

    Args:
        optimizer: An optimizer with masters.

    Attributes:
        waiting: Whether a hook has seen that the optimizer or the model was loaded.
        state: The ``id`` of the optimizer's state at the last check. It changes when any code loads the optimizer, since
            every load replaces the state.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.waiting = self._optimizers = False
        self._rounded = any(values is not None and is_low(values) for _, values, _, _ in _entries(optimizer))
        self.state = id(optimizer.state)

    def look(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer was loaded and has not stepped since.

        It may have been loaded before it was prepared.
        """
        found = any(values is not None for _, values, _, _ in _entries(optimizer))
        if found or id(optimizer.state) != self.state:
            self.waiting = self._optimizers = True
            self.state = id(optimizer.state)
        return self._optimizers

    def join(self, optimizer: Optimizer, pull: Callable[[], None], *, last: bool = False) -> None:
        """Give fp32 masters the loaded fp32 values that round to the model's weights.

        Values that do not fit the weights are kept, since the other of model and optimizer may be loaded later.

        Args:
            optimizer: The optimizer of this object.
            pull: Synchronises masters and the model's weights.
            last: Whether a step follows at once, so that nothing else will be loaded. Then a warning says what did not
                fit, and the loaded values are discarded.
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
    """Record how precise the value is that ``model.load_state_dict`` gives to a parameter."""
    value = local(value)
    _given[parameter] = "low" if is_low(value) else "wide" if _is_rounded(value, parameter.dtype) else "full"


def _all_given(optimizer: Optimizer) -> bool:
    """Whether ``model.load_state_dict`` gave a value to every parameter of an optimizer that has an fp32 master."""
    held = (p for group in optimizer.param_groups for p in group["params"])
    return all(parameter.stored in _given for parameter in held if _is_master(parameter))


@torch.no_grad()
def _merge(optimizer: Optimizer) -> tuple[int, int, int, bool]:
    """Give fp32 masters the loaded fp32 values that round to the model's values. Synchronises with the device.

    The original values that are kept for parameters without masters are treated like masters. A parameter is skipped if
    the model itself was loaded with unrounded values, since its master has these already.

    Returns:
        Four values. The number of parameters with masters. The number of parameters for which a loaded value did not round
        to the model's value. The number of masters without a loaded value. And whether all masters without a loaded value
        hold only values that are exact in the parameter's format.
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
    """Warn if loaded fp32 masters do not fit the model's weights or are missing, so training does not resume bit for bit."""
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
    """Return, for each element, whether the value rounds to the low value, directly or through another low format."""
    same = torch.zeros_like(low, dtype=torch.bool)
    for way in dict.fromkeys((low.dtype, *LOW_DTYPES)):
        rounded = values.to(way).to(low.dtype)
        same |= (rounded == low) | (rounded.isnan() & low.isnan())
        if same.all():
            break
    return same


def _is_rounded(master: Tensor, dtype: torch.dtype) -> bool:
    return bool((master.to(dtype).to(master.dtype) == master).all())
