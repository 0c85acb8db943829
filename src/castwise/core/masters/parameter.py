"""Define the fp32 master of a parameter that is stored in bf16 or fp16.

A parameter and its master share one fp32 gradient, which is stored on the parameter. Two attributes make that
possible. ``Tensor.grad_dtype`` of torch lets autograd accumulate fp32 gradients on a parameter stored in bf16 or
fp16. ``grad`` of the master is a property that reads and writes the parameter's gradient. So code that clears, scales
or clips the gradient of either changes the gradient that is applied, without a copy and after every reduction between
ranks. Attributes that users set (``p.use_muon``, ``p.grad_sample``) are stored on the parameter, no matter which of
the two they were set on.
"""

from __future__ import annotations

import copy
import functools
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

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
_FP32 = torch.float32
_masters: _torch.tensors.OfTensors[TensorWeakRef] = _torch.tensors.OfTensors()


class Master:
    """A mixin for the tensors that are fp32 masters of a model's parameter.

    A master has the hash of its parameter and is equal to the parameter. So dictionaries with the model's parameters
    as keys (``optimizer.state[model.weight]``, ``torch.distributed.checkpoint``) find the master. And if an optimizer
    has a parameter's master, torch refuses to add the parameter, as a duplicate.
    """

    stored: nn.Parameter
    """The model's parameter to which the fp32 master belongs, in bf16 or fp16."""
    former_grad_dtype: torch.dtype | None
    """The parameter's ``grad_dtype`` before it had an fp32 master. None means any dtype."""
    former_dtype: torch.dtype
    """The parameter's dtype before it had an fp32 master."""
    data_writes: DataWrites
    """The counter of writes through the parameter's ``data`` (see the module ``following``)."""

    @property
    def data(self) -> Tensor:
        """The fp32 master's values without autograd history, sharing its memory.

        Unlike with torch's ``data``, a write to these values counts as a write to the master. SAM and Lookahead write
        weights in this way outside of ``step``, and the model must be updated from the master afterwards.
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
        """The gradient that parameter and fp32 master share, in fp32.

        If the parameter has a gradient in a lower format, reading this property replaces it on the parameter by its
        fp32 value.
        """
        grad = self.stored.grad
        if grad is not None:
            if grad.dtype is not _FP32:
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
        """Whether the parameter requires a gradient.

        Setting this, as GAN loops do, sets it on the model's parameter.
        """
        return self.stored.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.stored.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set :attr:`requires_grad` of the parameter, and return the fp32 master."""
        self.stored.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Any) -> Any:
        """Register the hook on the model's parameter. Autograd's graph contains the parameter and not this fp32 master."""
        return self.stored.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register the hook on the model's parameter. Autograd's graph contains the parameter and not this fp32 master."""
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
        if value is None and name == "grad":  # zero_grad() does this
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
        """Pickle the fp32 master as an ordinary parameter, which ``torch.load(weights_only=True)`` loads.

        :func:`become_master` turns the loaded parameter into a master again.
        """
        tensor: Any = self
        data = tensor.detach()
        if not _is_plain(type(self)):
            return nn.Parameter(data, self.requires_grad).__reduce_ex__(protocol)
        plain = nn.Parameter(data.as_subclass(Tensor), self.requires_grad)
        vars(plain).update(vars(self.stored))
        return plain.__reduce_ex__(protocol)


_OF_COMPILERS = "_dynamo_"
"""The prefix of the attributes in which torch.compile stores facts about a tensor."""


def _is_own(master: Any, name: str) -> bool:
    """Whether an attribute is stored on the fp32 master and not on its parameter.

    Attributes that every tensor has and that can be set are stored on the master. All others, and ``__slots__`` of a
    subclass of ``nn.Parameter``, are stored on the parameter.
    """
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
    """Whether a class is a subclass of ``nn.Parameter``. Classes that wrap other tensors, such as DTensor, are not."""
    return issubclass(kind, nn.Parameter)


def make_master(stored: nn.Parameter, values: Tensor | None = None) -> nn.Parameter:
    """Create the fp32 master of a parameter and start to use it.

    The parameter's gradients are fp32 from then on, and its original values are discarded (see
    :func:`castwise.masters.original_of`).

    Args:
        stored: The parameter, in bf16 or fp16.
        values: As for :func:`new_master`.
    """
    master = new_master(stored, values)
    adopt(master)
    forget_original(stored)
    return master


def adopt(master: Any) -> None:
    """Start to use an fp32 master for its parameter, whose gradients are fp32 from then on.

    :func:`release` undoes this.
    """
    if master_of(master.stored) is not master:
        _masters[master.stored] = TensorWeakRef(master)
        fit_grad(master.stored, torch.float32)
        excuse(master.stored)


def new_master(stored: nn.Parameter, values: Tensor | None = None) -> nn.Parameter:
    """Return the current fp32 master of a parameter, or create a master without using it yet.

    :func:`adopt` starts to use the new master.

    Args:
        stored: The parameter, in bf16 or fp16.
        values: The values from which a new master starts, in any floating dtype, of the same shape. With None, it starts
            from the parameter's original values if they were kept, or else from the parameter. An fp32 tensor with the
            parameter's strides and device is used without a copy.

    Returns:
        A master in fp32 with the parameter's shape, strides and device.
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
    """Turn a parameter into an fp32 master again, in place, if it was a master before it was pickled and unpickled."""
    if not isinstance(parameter, Master):
        adopt(_as_master_of(stored, parameter))


def _as_master_of(stored: nn.Parameter, values: Any) -> nn.Parameter:
    fields = vars(values)
    if _is_plain(
        type(values)
    ):  # attributes that the user has set are read from the parameter, except those with the name of a tensor's attribute
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
    """A mixin for fp32 masters whose gradient has a graph, as ``backward(create_graph=True)`` creates it.

    ``torch.autograd.grad`` with respect to such a master differentiates with respect to its parameter. Second-order
    optimizers (AdaHessian) hold the master and differentiate with respect to it, but the graph contains the parameter.
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


# These classes are created at import and not with the first master, since creating one changes torch's list of classes that
# take foreach kernels, and an optimizer that was compiled before would depend on the old list.
_class_of("Differentiated", _DifferentiatedByStored, _class_of("Master", Master, nn.Parameter))


def master_of(parameter: Tensor) -> nn.Parameter | None:
    """Return the fp32 master weight of a model's parameter, or None if it has none.

    A plan that stores a parameter in bf16 or fp16 can keep an fp32 copy, the master weight, that the optimizer
    updates.
    """
    reference = _masters.get(parameter)
    return None if reference is None else reference()


def model_param_of(parameter: Tensor) -> Tensor:
    """Return the model's parameter to which an fp32 master weight belongs.

    An fp32 master weight is the copy that the optimizer updates when the model's parameter is in bf16 or fp16. Any
    other parameter is returned unchanged.
    """
    return parameter.stored if isinstance(parameter, Master) else parameter


def release(master: Any, *, write_back: bool | None) -> nn.Parameter:
    """Stop using an fp32 master for its parameter, whose gradient and ``grad_dtype`` become those of plain torch.

    Args:
        master: A master that :func:`make_master` returned.
        write_back: True makes the parameter fp32 and gives it the master's values and memory. With False, the parameter
            stays in bf16 or fp16, and the master's values are kept as its original values. With None, the parameter's
            values and its original values stay as they are.

    Returns:
        The parameter. It is unchanged if the master was already released for another optimizer.
    """
    parameter: nn.Parameter = master.stored
    current: Any = master_of(parameter)
    if current is not master:
        return parameter
    follows = master.former_grad_dtype is master.former_dtype
    # The master is forgotten last, so that after an interrupt one of the two still holds the full values.
    if write_back or (write_back is False and not is_low(parameter)):
        if parameter.shape == master.shape and not parameter.is_meta:
            values = master.data  # the parameter takes over the master's memory if strides and device match
            if values.stride() != parameter.stride() or values.device != parameter.device:
                values = torch.empty_like(parameter, dtype=values.dtype, requires_grad=False).copy_(values)
            assign(parameter, values)
        forget_original(parameter)
    elif write_back is False:
        remember_original(parameter, master.data, master.former_dtype)
    fit_grad(parameter, parameter.dtype if follows else master.former_grad_dtype)
    _masters.pop(parameter)
    return parameter


def allow_low_grad(parameter: nn.Parameter) -> None:
    """Allow a parameter with an fp32 master to get gradients in its own dtype.

    Reading ``master.grad`` converts them to fp32.
    """
    parameter.grad_dtype = None


def narrow_grad(parameter: nn.Parameter) -> None:
    """Round the fp32 gradient of a parameter to the parameter's dtype, in place on the parameter."""
    grad = parameter.grad
    if grad is not None and grad.dtype is not parameter.dtype:
        parameter.grad = grad.to(parameter.dtype)


def take_grad_fp32(parameter: nn.Parameter) -> Tensor:
    """Replace a parameter's gradient by its fp32 value, and return the fp32 gradient."""
    low = parameter.grad
    assert low is not None
    grad = low.to(torch.float32)
    if parameter.grad_dtype is not torch.float32:
        parameter.grad_dtype = (
            None  # allows any dtype, so that other code may still write gradients in a low dtype
        )
    parameter.grad = grad
    return grad


def mirror_grad(master: nn.Parameter, grad: Tensor | None) -> None:
    """Store a gradient in a master for code that bypasses the property :attr:`Master.grad`. None removes the gradient."""
    _own_grad.__set__(master, grad)
