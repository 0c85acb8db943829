"""Values in their former format of parameters that are stored low and have no master: frozen ones, and those of no optimizer yet.

A session remembers what it rounds. A master that is made later starts from it, checkpoints hold it, and
:func:`restore` puts it back. Elements that were changed in the parameter since then are taken from the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from castwise import _torch
from castwise.formats import LOW, get_format

__all__ = [
    "address",
    "agree",
    "assign",
    "forget_original",
    "is_low",
    "local",
    "merge_values",
    "original_of",
    "remember_original",
    "restore",
    "store",
]

_LOW_DTYPES = frozenset(get_format(name).dtype for name in LOW)
_originals: Any = WeakTensorKeyDictionary()


def is_low(tensor: Tensor) -> bool:
    """Whether a tensor is stored in bf16 or fp16."""
    return tensor.dtype in _LOW_DTYPES


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, detached and in the same memory; for a DTensor, its shard."""
    detached = tensor.detach()
    to_local = getattr(detached, "to_local", None)
    return detached if to_local is None else to_local()


def address(tensor: Tensor) -> int:
    """Where in memory a tensor lies; tells whether ``parameter.data`` was replaced."""
    return tensor.data_ptr() if type(tensor) is nn.Parameter else local(tensor).data_ptr()


def assign(parameter: Tensor, values: Tensor) -> None:
    """``parameter.data = values``, DTensors included, for which torch changes what they say and not what they hold."""
    if hasattr(parameter, "device_mesh"):
        _torch.set_dtensor(parameter, values)
    else:
        parameter.data = values


def agree(full: Tensor, values: Tensor) -> bool:
    """Whether low values are the full ones rounded, NaN included. Synchronises with the device."""
    rounded, values = local(full).to(values.dtype), local(values)
    return torch.equal(rounded, values) or bool(
        ((rounded == values) | (rounded.isnan() & values.isnan())).all()
    )


@torch.no_grad()
def merge_values(full: Tensor, values: Tensor, through: torch.dtype | None = None) -> bool:
    """Bring full values up to date with low ones that may have been changed by hand.

    Elements that still are the full value rounded keep it; all others are taken over. So a parameter half of which
    was overwritten loses nothing in the other half.

    Args:
        full: fp32, written to.
        values: bf16 or fp16, same shape.
        through: What they were rounded to if that is not their dtype: a parameter after ``model.float()``.

    Returns:
        Whether anything differed. Synchronises with the device.
    """
    full, values = local(full), local(values)
    rounded = full.to(through or values.dtype).to(values.dtype)
    if torch.equal(rounded, values):
        return False
    full.copy_(torch.where(rounded == values, full, values.to(full.dtype)))
    return True


def store(parameter: Tensor, dtype: torch.dtype, *, remember: bool = True) -> None:
    """Store a parameter in another format, in place, and remember the values that it had: :func:`restore` undoes it.

    Its gradient and ``grad_dtype`` follow.

    Args:
        parameter: Not a master's; DTensors too.
        dtype: bf16 or fp16; for any other nothing is remembered.
        remember: False where the rounded values are the parameter from now on, as under plans that train without
            masters: the memory of the former ones is free.
    """
    former = original_of(parameter)
    if former is None:
        former = parameter.detach()
    values = former.to(dtype)
    if remember and is_low(values) and former.dtype is not dtype:
        _originals[parameter] = former.data  # first: whatever interrupts this, the values are not lost
    _replace(parameter, values)
    if not remember:
        forget_original(parameter)


def remember_original(parameter: Tensor, values: Tensor) -> None:
    """Keep the values that a parameter had before it was stored low, as long as the parameter lives.

    Args:
        parameter: Stored in bf16 or fp16 now; of any other nothing is kept.
        values: Its values in another format, bf16 before fp16 included, same shape. The tensor itself is kept, not a
            copy.
    """
    if is_low(parameter) and values.dtype is not parameter.dtype:
        # values may be the parameter's former self, detached, which counts writes together with the parameter.
        _originals[parameter] = values.detach().data


def original_of(parameter: Tensor) -> Tensor | None:
    """The remembered values of a parameter, with what was changed in it since then, or None.

    Synchronises with the device, to look for such changes.
    """
    values: Tensor | None = _originals.get(parameter)
    if values is None:
        return None
    if not is_low(parameter) or values.shape != parameter.shape:  # stored anew, by model.float() or a resize
        forget_original(parameter)
        return None
    if values.device != parameter.device:
        values = _originals[parameter] = values.to(parameter.device)
    merge_values(values, parameter)
    return values


def forget_original(parameter: Tensor) -> None:
    """Keep nothing of the parameter any more."""
    _originals.pop(parameter, None)


def restore(parameter: Tensor) -> bool:
    """Store a parameter as it was before it was stored low, with its full values and what was changed in it since.

    Its gradient and ``grad_dtype`` follow. For parameters without a master; those with one are restored by
    ``Attachment.detach(write_back=True)``.

    Returns:
        Whether there was something to restore. Synchronises with the device.
    """
    values = original_of(parameter)
    if values is None:
        return False
    if values.stride() != parameter.stride():  # the memory format was changed since
        values = torch.empty_like(parameter, dtype=values.dtype, requires_grad=False).copy_(values)
    _replace(parameter, values)
    forget_original(parameter)
    return True


def _replace(parameter: Tensor, values: Tensor) -> None:
    # A grad_dtype that equals the dtype is torch's default, or what is left of it once it was set: it cannot be unset.
    grad, follows = parameter.grad, parameter.grad_dtype is parameter.dtype
    parameter.grad = None
    assign(parameter, values)
    if follows and parameter.grad_dtype is not parameter.dtype:
        parameter.grad_dtype = parameter.dtype
    if grad is not None:
        parameter.grad = grad.to(parameter.dtype) if follows else grad
