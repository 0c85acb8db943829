"""Record the dtypes in which prepared models store their parameters, and detect later casts such as ``model.half()``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from castwise.core import _torch
from castwise.errors import StateError

_stored: _torch.tensors.OfTensors[torch.dtype] = _torch.tensors.OfTensors()
_narrow: Any = WeakTensorKeyDictionary()
"""The dtype to which each parameter is cast at present, for parameters that their prepared model stores in a wider dtype."""


def note_formats(model: nn.Module) -> None:
    """Record the dtypes of a model's parameters as those in which the prepared model stores them."""
    for parameter in model.parameters():
        _stored[parameter] = parameter.dtype
    _casts.begin()


def note_format(parameter: Tensor) -> None:
    """Record the current dtype of a parameter as the one in which its prepared model stores it."""
    if parameter in _stored:
        _stored[parameter] = parameter.dtype


def forget_formats(model: nn.Module) -> None:
    """Forget the recorded dtypes of a model that is no longer prepared."""
    for parameter in model.parameters():
        _stored.pop(parameter)
    if not len(_stored):
        _casts.end()


def _follow_casts(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``nn.Module._apply``, the implementation of ``model.half()`` and similar methods, with a check.

    The wrapped method warns if it casts parameters of a prepared model back to their stored dtype after a cast to a
    narrower dtype, because the low bits are lost.
    """
    depth = 0

    def applied(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            result = apply(module, *args, **kwargs)
        finally:
            depth -= 1
        if not depth:
            back = {}
            for name, parameter in module.named_parameters():
                stored, now = stored_format(parameter), parameter.dtype
                if now is stored and parameter in _narrow:
                    back[name] = _narrow.pop(parameter)
                elif _is_narrower(now, stored):
                    _narrow[parameter] = now
            if back:
                name, dtype = next(iter(back.items()))
                warnings.warn(
                    f"{len(back)} parameters of a prepared {type(module).__name__}, {name} among them, were cast to {dtype} and back, "
                    "so the digits that this dtype cannot hold are lost. Leave casting to the plan; if this was not meant, "
                    "load the "
                    "weights from a checkpoint.",
                    stacklevel=3,
                )
        return result

    return applied


_casts = _torch.hooks.Replacement(nn.Module, "_apply", _follow_casts)


def _is_narrower(dtype: torch.dtype, stored: torch.dtype) -> bool:
    if dtype is stored or not (dtype.is_floating_point and stored.is_floating_point):
        return False
    return torch.finfo(dtype).bits < torch.finfo(stored).bits


def are_noted(numbers: Collection[int]) -> bool:
    """Whether one of the parameters that live at these ids belongs to a prepared model."""
    return _stored.holds_any(numbers)


def stored_format(parameter: Tensor) -> Any:
    """Return the dtype in which a parameter was stored when its model was prepared, or its current dtype if it was not."""
    return _stored.get(parameter, parameter.dtype)


def narrowed(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a prepared model that have a narrower dtype than when it was prepared, by name."""
    cast = {name: p for name, p in model.named_parameters() if _stored.get(p, p.dtype) is not p.dtype}
    return {name: p for name, p in cast.items() if _is_narrower(p.dtype, stored_format(p))}


def is_cast(parameter: Tensor) -> bool:
    """Whether a parameter of a prepared model has another dtype than when it was prepared, as after ``model.half()``."""
    return stored_format(parameter) is not parameter.dtype


def say_cast(name: str, parameter: Tensor) -> str:
    """Return the text of an error that describes the cast of a parameter, for which :func:`is_cast` holds, and the remedy."""
    return (
        f"{name} was stored in {stored_format(parameter)} when the model was prepared and is {parameter.dtype} now, as after model.half(), "
        "model.double() or model.to(dtype). Leave casting to the plan: cast the model back, or prepare it again after changing "
        "its dtype: amp.close(), then amp.prepare(model, optimizer)."
    )


def refuse_cast(model: nn.Module) -> None:
    """Raise if any trained parameter of a model was cast since the model was prepared.

    Raises:
        StateError: A trained parameter was cast.
    """
    for name, parameter in model.named_parameters():
        if is_cast(parameter) and parameter.requires_grad:
            raise StateError(f"forward of this {type(model).__name__}: {say_cast(name, parameter)}")


def explain_cast(error: BaseException | None, model: nn.Module) -> None:
    """Add to the message of an operator's error that parameters were cast or replaced since the model was prepared, if they were.

    A forward hook calls this. torch silences errors that a hook raises after an exception, so the message of the
    exception is extended instead.
    """
    if not isinstance(error, RuntimeError) or not error.args or not isinstance(error.args[0], str):
        return
    of_dtypes = any(word in error.args[0] for word in ("dtype", "scalar type", "same type"))
    for name, parameter in model.named_parameters():
        if "castwise:" in error.args[0]:
            return
        if is_cast(parameter):
            error.args = (f"{error.args[0]}\ncastwise: {say_cast(name, parameter)}", *error.args[1:])
        elif of_dtypes and _is_replaced(parameter, model):
            said = (
                f"{name} is not the parameter that prepare found and stored as the plan says: load_state_dict(assign=True), for one, "
                f"replaces parameters. This one is stored in {parameter.dtype}. Write into the parameter instead, by copy_ or "
                "load_state_dict without assign, or load before prepare."
            )
            error.args = (f"{error.args[0]}\ncastwise: {said}", *error.args[1:])


def _is_replaced(parameter: Tensor, model: nn.Module) -> bool:
    """Whether a parameter came into a prepared model later, in a dtype that the others do not have."""
    return parameter not in _stored and parameter.dtype not in {
        p.dtype for p in model.parameters() if p in _stored
    }
