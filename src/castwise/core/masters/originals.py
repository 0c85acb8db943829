"""Keep the original values of parameters that are stored in bf16 or fp16 and have no fp32 master.

Such parameters are frozen, or in no optimizer yet. The original of a parameter is its value from before it was
rounded, in the wider format that it had. A master that is created later starts from the original, checkpoints save
the original, and :func:`restore` restores it. Elements of the parameter that were changed since are taken from the
parameter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from castwise.core import _torch
from castwise.core.plans.formats import LOW_DTYPES

_originals: _torch.tensors.OfTensors[_Original] = _torch.tensors.OfTensors()
_former: _torch.tensors.OfTensors[torch.dtype] = _torch.tensors.OfTensors()


class _Original(NamedTuple):
    """The original values of a parameter, the format in which it is stored, and its version counter when recorded."""

    values: Tensor
    stored: torch.dtype
    written: int


def is_low(tensor: Tensor) -> bool:
    """Whether a tensor is stored in bf16 or fp16."""
    return tensor.dtype in LOW_DTYPES


def local(tensor: Tensor) -> Tensor:
    """Return a tensor, or this rank's shard of a DTensor, detached and sharing its memory."""
    detached = tensor.detach()
    to_local = getattr(detached, "to_local", None)
    return detached if to_local is None else to_local()


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which changes if ``parameter.data`` is replaced."""
    return local(tensor).data_ptr() if hasattr(type(tensor), "to_local") else tensor.data_ptr()


def assign(parameter: Tensor, values: Tensor) -> None:
    """Set ``parameter.data = values``.

    With DTensors, torch alone would update the metadata but not the local tensor.
    """
    if hasattr(parameter, "device_mesh"):
        _torch.distributed.set_dtensor(parameter, values)
    else:
        _torch.tensors.assign(parameter, values)


def agree(full: Tensor, values: Tensor) -> bool:
    """Whether rounding ``full`` gives ``values``. Two NaN count as equal. Synchronises with the device."""
    return _equal(local(full).to(values.dtype), local(values))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype have the same elements. Two NaN count as equal."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def merge_values(
    full: Tensor, values: Tensor, through: torch.dtype | None = None, *, cast: bool = False
) -> bool:
    """Update fp32 values from a parameter that was rounded from them, and that may have been changed by hand since.

    Where an element of the parameter equals the fp32 value rounded, the fp32 value is kept. All other elements are
    replaced. So if half of a parameter was overwritten, the other half loses no precision. Synchronises with the
    device.

    Args:
        full: The fp32 values, written to.
        values: The parameter's values, of the same shape, on the same device.
        through: The low format to which ``values`` were rounded. None if that is their dtype.
        cast: Whether ``values`` may have been cast through other formats, as by ``model.half().float()``, which
            autograd does not count as a write. Elements that only such a cast has changed keep the fp32 value. If
            ``values`` are in the format to which they were first rounded, a cast counts only if it explains all elements.
            Otherwise some elements would match by chance, as after ``parameter.data = average``.

    Returns:
        Whether anything differed.
    """
    full, values = local(full), local(values)
    rounded = full.to(through or values.dtype)
    if torch.equal(rounded.to(values.dtype), values):
        return False
    with torch.no_grad():
        _merge(full, values, rounded, cast)
    return True


def _merge(full: Tensor, values: Tensor, rounded: Tensor, cast: bool) -> None:
    same = rounded.to(values.dtype) == values
    for way in LOW_DTYPES if cast else ():
        by_way = rounded.to(way).to(values.dtype)
        if values.dtype is not rounded.dtype:
            same |= by_way == values
        elif _equal(by_way, values):
            return
    full.copy_(torch.where(same, full, values.to(full.dtype)))


def store(parameter: Tensor, dtype: torch.dtype) -> None:
    """Store a parameter in another format in place, and keep its original values. :func:`restore` undoes this.

    The parameter's gradient and ``grad_dtype`` are converted too. The parameter may be a DTensor, but must not have an
    fp32 master. If the new format is neither bf16 nor fp16, no original is kept.
    """
    former = original_of(parameter)
    if former is None:
        former = parameter.detach()
    with torch.inference_mode(parameter.is_inference()):
        values = former.to(dtype)
    if is_low(values) and former.dtype is not dtype:
        # This is recorded first, so that an interrupt cannot lose the values.
        _originals[parameter] = _Original(former.data, dtype, _torch.tensors.version(parameter))
    _replace(parameter, values)


def remember_original(parameter: Tensor, values: Tensor, stored: torch.dtype | None = None) -> None:
    """Keep the values that a parameter had before it was stored low, for the lifetime of the parameter.

    Args:
        parameter: A parameter that is stored in bf16 or fp16 now. For any other parameter, nothing is kept.
        values: The parameter's values in another format, of the same shape. The other format may be bf16 if the parameter
            is fp16. The tensor itself is kept, not a copy.
        stored: The format in which the parameter was stored low, if it has been cast since.
    """
    if is_low(parameter) and values.dtype is not parameter.dtype:
        # values may be the parameter's former tensor, detached, which counts writes together with the parameter.
        original = _Original(
            values.detach().data, stored or parameter.dtype, _torch.tensors.version(parameter)
        )
        _originals[parameter] = original


def original_of(parameter: Tensor) -> Tensor | None:
    """Return the original values of a parameter, updated by later writes to the parameter, or None if there are none.

    A cast such as ``model.float()`` does not count as a write. Synchronises with the device, to find writes.
    """
    known: _Original | None = _originals.get(parameter)
    if known is None:
        return None
    if known.values.shape != parameter.shape:
        forget_original(parameter)
        return None
    values, written = known.values.to(parameter.device), _torch.tensors.version(parameter)
    cast = parameter.dtype is not known.stored or written == known.written
    merge_values(values, parameter, known.stored, cast=cast)
    if values is not known.values or written != known.written:
        _originals[parameter] = known._replace(values=values, written=written)
    return values


def is_written(parameter: Tensor) -> bool | None:
    """Whether a parameter's values differ from its rounded original values; None if no original values are kept."""
    known: _Original | None = _originals.get(parameter)
    if known is None or known.values.shape != parameter.shape:
        return None
    return not agree(known.values.to(parameter.device), parameter)


def note_former(tensor: Tensor, dtype: torch.dtype) -> None:
    """Record the format that a tensor has before a plan stores it in another format.

    Only the first call for a tensor has an effect.
    """
    if tensor not in _former:
        _former[tensor] = dtype


def former_dtype(tensor: Tensor) -> torch.dtype:
    """Return the format that a tensor had before any plan stored it in another format."""
    found: torch.dtype = _former.get(tensor, tensor.dtype)
    return found


def forget_former(tensor: Tensor, dtype: torch.dtype) -> None:
    """Undo :func:`note_former` if it recorded this format."""
    if _former.get(tensor) is dtype:
        _former.pop(tensor)


def forget_original(parameter: Tensor) -> None:
    """Discard the original values of a parameter, if any are kept."""
    _originals.pop(parameter)


def restore(parameter: Tensor) -> bool:
    """Give a parameter its former format again, with its original values updated by later writes to the parameter.

    The parameter's gradient and ``grad_dtype`` are converted too. The parameter must not have an fp32 master.
    Parameters with masters are restored by ``Attachment.detach(write_back=True)``. Synchronises with the device.

    Returns:
        Whether there were original values to restore.
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
    # A grad_dtype equal to the dtype is torch's default, or a value that was set once: it cannot be unset. Parameters of a copied
    # ScriptModule are no leaves, and have none.
    follows = parameter.is_leaf and parameter.grad_dtype is parameter.dtype
    assign(parameter, values)
    if follows:
        fit_grad(parameter, parameter.dtype)


def fit_grad(parameter: Tensor, dtype: torch.dtype | None) -> None:
    """Set ``grad_dtype`` of a parameter, and cast its gradient to that dtype.

    ``grad_dtype`` None allows gradients of any dtype. An existing gradient is then cast to the parameter's dtype. An
    interrupt at any point does not lose the gradient.
    """
    grad, wanted = parameter.grad, dtype or parameter.dtype
    if grad is not None and grad.dtype is not wanted:
        parameter.grad_dtype = None  # allows any dtype, until the gradient has the right one
        parameter.grad = grad.to(wanted)
    if parameter.grad_dtype is not dtype:
        parameter.grad_dtype = dtype
