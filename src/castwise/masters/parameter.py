"""The fp32 master of one parameter.

A parameter and its master have one gradient between them, in fp32, and it lives on the parameter. Two attributes
of torch make that possible: ``Tensor.grad_dtype`` lets autograd accumulate fp32 gradients on a parameter stored
in bf16 or fp16, and ``grad`` of the master is a property that reads and writes the parameter's. So whatever
clears, scales or clips either of the two acts on what is applied, with no copy and after every reduction.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from castwise.formats import LOW, get_format

__all__ = [
    "Master",
    "forget",
    "is_low",
    "local",
    "make_master",
    "master_of",
    "merge_values",
    "mirror_grad",
    "model_param_of",
    "refresh_master",
]

_LOW_DTYPES = frozenset(get_format(name).dtype for name in LOW)
_own_grad: Any = torch.Tensor.grad
_masters: Any = WeakTensorKeyDictionary()


def is_low(tensor: Tensor) -> bool:
    """Whether a tensor is stored in bf16 or fp16."""
    return tensor.dtype in _LOW_DTYPES


class Master:
    """What makes a tensor the master of :attr:`stored`; every master is an instance, and a tensor as well.

    A master hashes as its parameter does and equals it, so that tables keyed by the model's own parameters
    (``optimizer.state[model.weight]``, ``torch.distributed.checkpoint``) find it, and adding a parameter to an
    optimizer that already has its master is refused by torch as a duplicate.
    """

    stored: nn.Parameter
    """The model's parameter, in bf16 or fp16."""

    @property
    def grad(self) -> Tensor | None:
        """The one gradient of parameter and master, in fp32.

        A gradient that somebody left on the parameter in a lower format is replaced there by its fp32 value.
        """
        grad = self.stored.grad
        if grad is not None and grad.dtype is not torch.float32:
            grad = take_grad_fp32(self.stored)
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.stored.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.stored.grad = None

    def __hash__(self) -> int:
        return id(self.stored)

    def __eq__(self, other: object) -> Any:
        if other is self.stored or other is self:
            return True
        tensor: Any = self
        return torch.Tensor.__eq__(tensor, other)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        if id(self) not in memo:
            tensor: Any = self
            data = tensor.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = make_master(copy.deepcopy(self.stored, memo), data)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        tensor: Any = self
        return make_master, (self.stored, _as_plain(tensor.detach()))


class MasterParameter(Master, nn.Parameter):
    """The master of an ordinary parameter."""


def make_master(stored: nn.Parameter, values: Tensor | None = None) -> nn.Parameter:
    """The master of ``stored``: the one it already has, or a new one.

    Args:
        stored: Parameter in bf16 or fp16; from now on its gradients are fp32.
        values: What to start from, any floating dtype, same shape; the parameter itself if None. An fp32 tensor
            with the parameter's strides on its device is taken as it is, without a copy.

    Returns:
        fp32, with the parameter's shape, strides and device.
    """
    existing = master_of(stored)
    if existing is not None:
        return existing
    source = stored.detach() if values is None else values.detach()
    data = source
    if (
        source.dtype is not torch.float32
        or source.stride() != stored.stride()
        or source.device != stored.device
    ):
        data = torch.empty_like(stored, dtype=torch.float32, requires_grad=False).copy_(source)
    if type(data) is Tensor:
        master: Any = MasterParameter(data, requires_grad=True)
    else:  # DTensor and the like: nn.Parameter keeps their class, and so must the master
        master = nn.Parameter(data.detach(), requires_grad=True)
        master.__class__ = _class_for(type(data))
    master.stored = stored
    want_grad_fp32(stored)
    _masters[stored] = TensorWeakRef(master)
    return master  # type: ignore[no-any-return]


@functools.cache
def _class_for(kind: type) -> type:
    return type(f"Master{kind.__name__}", (Master, kind), {})


def _as_plain(data: Tensor) -> Tensor:
    if isinstance(data, MasterParameter):
        return data.as_subclass(Tensor)
    return data


def master_of(parameter: Tensor) -> nn.Parameter | None:
    """The living fp32 master of a model's parameter, or None if it has none."""
    reference = _masters.get(parameter)
    return None if reference is None else reference()


def model_param_of(parameter: Tensor) -> Tensor:
    """The model's parameter behind what an optimizer holds: that of a master, anything else itself."""
    return parameter.stored if isinstance(parameter, Master) else parameter


def forget(parameter: nn.Parameter) -> None:
    """Let the parameter be without a master again."""
    _masters.pop(parameter, None)


def want_grad_fp32(parameter: nn.Parameter) -> None:
    """Make autograd accumulate fp32 gradients on the parameter, whatever it is stored in."""
    grad = parameter.grad
    parameter.grad = None
    parameter.grad_dtype = torch.float32
    if grad is not None:
        parameter.grad = grad.to(torch.float32)


def want_grad_as_stored(parameter: nn.Parameter) -> None:
    """Undo :func:`want_grad_fp32`: gradients in the parameter's own dtype, as torch has it."""
    grad = parameter.grad
    parameter.grad = None
    parameter.grad_dtype = parameter.dtype
    if grad is not None:
        parameter.grad = grad.to(parameter.dtype)


def allow_low_grad(parameter: nn.Parameter) -> None:
    """Let autograd and others write gradients in the parameter's own dtype; reading its master's widens them."""
    parameter.grad_dtype = None


def narrow_grad(parameter: nn.Parameter) -> None:
    """Store a gradient that was widened in the parameter's own dtype again, rounded."""
    grad = parameter.grad
    if grad is not None and grad.dtype is not parameter.dtype:
        parameter.grad = grad.to(parameter.dtype)


def take_grad_fp32(parameter: nn.Parameter) -> Tensor:
    """Replace the gradient that lies on the parameter by its fp32 value, and return that."""
    low = parameter.grad
    assert low is not None
    grad = low.to(torch.float32)
    parameter.grad = None
    if parameter.grad_dtype is not torch.float32:
        parameter.grad_dtype = None  # any dtype, so that whoever writes low gradients can go on doing so
    parameter.grad = grad
    return grad


def mirror_grad(master: nn.Parameter, grad: Tensor | None) -> None:
    """Put a reference to the gradient where code that bypasses the property looks, or take it away with None."""
    _own_grad.__set__(master, grad)


@torch.no_grad()
def merge_values(master: Tensor, values: Tensor) -> bool:
    """Bring a master up to date with low values that may have been changed by hand.

    Elements that still are the master rounded keep the master's full value; all others are taken over. So a
    parameter half of which was overwritten loses nothing in the other half.

    Args:
        master: fp32, written to.
        values: bf16 or fp16, same shape.

    Returns:
        Whether anything differed. Synchronises with the device.
    """
    master, values = local(master), local(values)
    rounded = master.to(values.dtype)
    if torch.equal(rounded, values):
        return False
    master.copy_(torch.where(rounded == values, master, values.to(master.dtype)))
    return True


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, detached and in the same memory; for a DTensor, its shard."""
    detached = tensor.detach()
    to_local = getattr(detached, "to_local", None)
    return detached if to_local is None else to_local()


def refresh_master(parameter: nn.Parameter) -> bool:
    """Bring the parameter's master up to date with it, as after ``parameter.data.copy_(...)``, which is invisible.

    Returns:
        Whether anything differed; False also if there is no master. Synchronises with the device.
    """
    master = master_of(parameter)
    return master is not None and merge_values(master, parameter)
