"""The fp32 master of one parameter.

A parameter and its master share one fp32 gradient, which is stored on the parameter. Two attributes
of torch make that possible: ``Tensor.grad_dtype`` lets autograd accumulate fp32 gradients on a parameter stored
in bf16 or fp16, and ``grad`` of the master is a property that reads and writes the parameter's. So code that
clears, scales or clips either gradient changes the one that is applied, without a copy and after every reduction.
Attributes that users set (``p.use_muon``, ``p.grad_sample``) are stored on the parameter as well, whichever of the two
they were set on.
"""

from __future__ import annotations

import copy
import functools
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from castwise.core import _torch
from castwise.core.masters.copies import excuse
from castwise.core.masters.originals import (
    assign,
    fit_grad,
    forget_original,
    is_low,
    original_of,
    remember_original,
)
from castwise.core.masters.writes import DataWrites

_own_data: Any = torch.Tensor.data
_own_grad: Any = torch.Tensor.grad
_own_attributes: Any = torch.Tensor.__dict__["__dict__"]
_masters: Any = WeakTensorKeyDictionary()


class Master:
    """Mixin of every master of a parameter :attr:`stored`; a master is also a tensor.

    A master hashes as its parameter does and equals it, so that tables keyed by the model's parameters
    (``optimizer.state[model.weight]``, ``torch.distributed.checkpoint``) find it, and torch refuses, as a duplicate,
    to add a parameter to an optimizer that already has its master.
    """

    stored: nn.Parameter
    """The model's parameter, in bf16 or fp16."""
    former_grad_dtype: torch.dtype | None
    """The parameter's ``grad_dtype`` before it had a master; None means any dtype."""
    former_dtype: torch.dtype
    """The parameter's dtype before it had a master."""
    data_writes: DataWrites
    """Writes through the parameter's ``data`` (see ``following``)."""

    @property
    def data(self) -> Tensor:
        """The master's values without autograd history, sharing its memory.

        A write to them counts as a write to the master, unlike with torch's ``data``: SAM and
        Lookahead write weights in this way outside of ``step``, and the model must be updated.
        """
        tensor: Any = self
        return tensor.detach()  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        master: Any = self
        if hasattr(master, "device_mesh"):
            _torch.distributed.set_dtensor(master, value)
        else:
            _own_data.__set__(master, value)
        torch.autograd.graph.increment_version(master)

    @property
    def grad(self) -> Tensor | None:
        """The gradient that parameter and master share, in fp32.

        A gradient in a lower format on the parameter is replaced there by its fp32 value.
        """
        grad = self.stored.grad
        if grad is not None:
            if grad.dtype is not torch.float32:
                grad = take_grad_fp32(self.stored)
            if grad.requires_grad and not isinstance(self, _DifferentiatedByStored):
                master: Any = self
                kind: type = type(self)
                master.__class__ = _class_of("Differentiated", _DifferentiatedByStored, kind)
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and is_low(value) and self.stored.grad_dtype is torch.float32:
            value = value.to(
                torch.float32
            )  # from an optimizer that assumes that the gradient has the parameter's dtype
        self.stored.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.stored.grad = None

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter requires a gradient: setting it on a master, as GAN loops do, sets it on the model's parameter."""
        return self.stored.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.stored.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set :attr:`requires_grad`; returns the master."""
        self.stored.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Any) -> Any:
        """Register a hook on the parameter, which is in autograd's graph."""
        return self.stored.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register a hook on the parameter, which is in autograd's graph."""
        return self.stored.register_post_accumulate_grad_hook(hook)

    # --- attributes: those of a tensor belong to the master, all others to the parameter ----------------------

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return vars(self.stored)

    def __getattr__(self, name: str) -> Any:
        if name in Master.__annotations__ or name.startswith(_OF_COMPILERS):
            raise AttributeError(name)
        return getattr(self.stored, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if value is None and name == "grad":  # as each zero_grad() does
            self.stored.grad = None
        elif name == "grad" or _is_own(self, name):
            super().__setattr__(name, value)
        else:
            setattr(self.stored, name, value)
            if hasattr(Tensor, name):
                _own_attributes.__get__(self)[name] = value

    def __delattr__(self, name: str) -> None:
        if _is_own(self, name):
            super().__delattr__(name)
        else:
            delattr(self.stored, name)
            _own_attributes.__get__(self).pop(name, None)

    # --- keys, copies, pickles ------------------------------------------------------------------------------

    def __hash__(self) -> int:
        return id(self.stored)

    def __eq__(self, other: object) -> Any:
        if other is self.stored or other is self:
            return True
        tensor: Any = self
        return torch.Tensor.__eq__(tensor, other)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            tensor: Any = self
            data = tensor.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = make_master(copy.deepcopy(self.stored, memo), data)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary parameter for ``torch.load(weights_only=True)``; :func:`become_master` reverts that."""
        tensor: Any = self
        data = tensor.detach()
        if not _is_plain(type(self)):
            return nn.Parameter(data, self.requires_grad).__reduce_ex__(protocol)
        plain = nn.Parameter(data.as_subclass(Tensor), self.requires_grad)
        vars(plain).update(vars(self.stored))
        return plain.__reduce_ex__(protocol)


_OF_COMPILERS = "_dynamo_"
"""Prefixes of attributes in which torch.compile stores facts about a tensor."""


def _is_own(master: Any, name: str) -> bool:
    """Whether an attribute belongs to the master; slots of a parameter class of the user do not."""
    if name in Master.__annotations__ or name.startswith(_OF_COMPILERS):
        return True
    if not _is_plain(type(master)) and name in _own_attributes.__get__(master):
        return True
    home = next((base for base in type(master).__mro__ if name in vars(base)), object)
    found = vars(home).get(name)
    return hasattr(found, "__set__") and not (
        isinstance(found, MemberDescriptorType) and issubclass(home, nn.Parameter)
    )


def _is_plain(kind: type) -> bool:
    """Whether parameters of a class are plain memory, as those of subclasses of ``nn.Parameter`` are."""
    return issubclass(kind, nn.Parameter)


def make_master(stored: nn.Parameter, values: Tensor | None = None) -> nn.Parameter:
    """:func:`new_master`, activated: gradients of the parameter are fp32 from now on, and its original is discarded."""
    master = new_master(stored, values)
    adopt(master)
    forget_original(stored)
    return master


def adopt(master: Any) -> None:
    """Give a parameter a master; :func:`release` undoes it."""
    if master_of(master.stored) is not master:
        _masters[master.stored] = TensorWeakRef(master)
        fit_grad(master.stored, torch.float32)
        excuse(master.stored)


def new_master(stored: nn.Parameter, values: Tensor | None = None) -> nn.Parameter:
    """The master of ``stored``: its current one, or a new one that is not yet active.

    Args:
        stored: Parameter in bf16 or fp16.
        values: Start values, any floating dtype, same shape; if None, the parameter's remembered
            original, else the parameter. An fp32 tensor with the parameter's strides on its device is used
            without a copy.

    Returns:
        fp32, with the parameter's shape, strides and device.
    """
    existing = master_of(stored)
    if existing is not None:
        return existing
    if values is None:
        values = original_of(stored)
    # Tensor.data, unlike detach(), does not share a version counter with its source.
    data = source = (stored if values is None else values).detach().data
    if (
        source.dtype is not torch.float32
        or source.stride() != stored.stride()
        or source.device != stored.device
    ):
        data = torch.empty_like(stored, dtype=torch.float32, requires_grad=False).copy_(source)
    if _is_plain(type(stored)):
        master: Any = nn.Parameter.__new__(type(stored), data.as_subclass(Tensor))
    else:  # nn.Parameter keeps the class of DTensor and other tensor subclasses, and so must the master
        master = nn.Parameter(data.detach(), requires_grad=True)
    return _as_master_of(stored, master)


def become_master(parameter: nn.Parameter, stored: nn.Parameter) -> None:
    """Turn an unpickled parameter back into the master that it was, in place."""
    if not isinstance(parameter, Master):
        adopt(_as_master_of(stored, parameter))


def _as_master_of(stored: nn.Parameter, values: Any) -> nn.Parameter:
    fields = vars(values)
    if _is_plain(
        type(values)
    ):  # attributes set by the user are looked up on the parameter, except those with the name of a tensor method
        fields.clear()
        fields.update((name, value) for name, value in vars(stored).items() if hasattr(Tensor, name))
    fields.update(
        stored=stored,
        former_grad_dtype=stored.grad_dtype,
        former_dtype=stored.dtype,
        data_writes=DataWrites(),
    )
    kind: Any = type(values)
    values.__class__ = _class_of("Master", Master, kind)
    return values  # type: ignore[no-any-return]


class _DifferentiatedByStored:
    """A master whose gradient has a graph, as ``backward(create_graph=True)`` creates it.

    The graph refers to the parameter, and second-order optimizers (AdaHessian) differentiate with respect to what they
    hold.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            args = (args[0], tuple(model_param_of(tensor) for tensor in args[1]), *args[2:])
        return _torch.tensors.below_torch_function(func, args, kwargs or {})


@functools.cache
def _class_of(name: str, base: type, kind: type) -> type:
    made = type(f"{name}{kind.__name__}", (base, kind), {})
    _torch.optimizers.treat_as(made, kind)
    return made


# Created at import, not with the first master: an optimizer that torch.compile compiled earlier depends on torch's list.
_class_of("Differentiated", _DifferentiatedByStored, _class_of("Master", Master, nn.Parameter))


def master_of(parameter: Tensor) -> nn.Parameter | None:
    """The live fp32 master of a model's parameter, or None."""
    reference = _masters.get(parameter)
    return None if reference is None else reference()


def model_param_of(parameter: Tensor) -> Tensor:
    """The model's parameter behind a master; any other parameter is returned unchanged."""
    return parameter.stored if isinstance(parameter, Master) else parameter


def release(master: Any, *, write_back: bool | None) -> nn.Parameter:
    """Remove a parameter's master; gradient and ``grad_dtype`` become those of plain torch.

    Args:
        master: A master that :func:`make_master` returned.
        write_back: The parameter becomes fp32 and takes the master's values and memory. Otherwise it stays low, and
            the master's values are remembered as its original. None: values are left alone, the remembered ones too.

    Returns:
        The parameter, unchanged if another optimizer released the master before.
    """
    parameter: nn.Parameter = master.stored
    current: Any = master_of(parameter)
    if current is not master:
        return parameter
    follows = master.former_grad_dtype is master.former_dtype
    # The master is forgotten last, so that after an interrupt one of the two still holds the full values.
    if write_back or (write_back is False and not is_low(parameter)):
        if parameter.shape == master.shape and not parameter.is_meta:
            values = master.data  # and its memory, if it has the parameter's strides
            if values.stride() != parameter.stride() or values.device != parameter.device:
                values = torch.empty_like(parameter, dtype=values.dtype, requires_grad=False).copy_(values)
            assign(parameter, values)
        forget_original(parameter)
    elif write_back is False:
        remember_original(parameter, master.data, master.former_dtype)
    fit_grad(parameter, parameter.dtype if follows else master.former_grad_dtype)
    _masters.pop(parameter, None)
    return parameter


def allow_low_grad(parameter: nn.Parameter) -> None:
    """Allow gradients in the parameter's dtype; reading the master's gradient converts them to fp32."""
    parameter.grad_dtype = None


def narrow_grad(parameter: nn.Parameter) -> None:
    """Round an fp32 gradient to the parameter's dtype again."""
    grad = parameter.grad
    if grad is not None and grad.dtype is not parameter.dtype:
        parameter.grad = grad.to(parameter.dtype)


def take_grad_fp32(parameter: nn.Parameter) -> Tensor:
    """Replace the parameter's gradient by its fp32 value, and return it."""
    low = parameter.grad
    assert low is not None
    grad = low.to(torch.float32)
    if parameter.grad_dtype is not torch.float32:
        parameter.grad_dtype = None  # any dtype, so that code which writes low gradients can go on doing so
    parameter.grad = grad
    return grad


def mirror_grad(master: nn.Parameter, grad: Tensor | None) -> None:
    """Set a reference to the gradient for code that bypasses the property, or remove it with None."""
    _own_grad.__set__(master, grad)
