"""The dispatcher: autocast kernels, modes that intercept operators, and how torch treats Python numbers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library, get_kernel

_EXACT: dict[Any, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
NUMBERS: tuple[Any, ...] = tuple(_EXACT)
"""Python's number types."""
AUTOCAST_KEYS: dict[str, str] = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
}
"""Dispatch key for each device type's autocast kernels."""


def autocast_registrations(device_type: str) -> frozenset[str]:
    """Operators (``aten::exp.out`` style) that have their own autocast kernel on a device type."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(AUTOCAST_KEYS[device_type])
    return frozenset(names)


def is_dispatched(op: torch._ops.OpOverload) -> bool:
    """Whether the overload goes through the dispatcher; a few (``einsum.sublist``) exist for TorchScript alone."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def native_autocast_call(op: torch._ops.OpOverload, device_type: str) -> Callable[..., Any]:
    """Torch's current kernel for ``op`` on the autocast key; call it as ``f(keyset, *args, **kwargs)``.

    For an operator that torch lists this is torch's casting kernel. For any other the key is a fallthrough,
    whose kernel object cannot be called, so the call continues below the key; the thread-local state stays on, as
    in torch, so that operators inside a composite one are still autocast.
    """
    key = AUTOCAST_KEYS[device_type]
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        call: Callable[..., Any] = get_kernel(op, key).call_boxed
        return call
    return below_autocast_call(op, device_type)


def below_autocast_call(op: torch._ops.OpOverload, device_type: str) -> Callable[..., Any]:
    """Run ``op`` below the autocast key, as torch runs operators that are not on its lists.

    Called as ``f(keyset, *args, **kwargs)``. Operators inside a composite one are still autocast.
    """
    key = AUTOCAST_KEYS[device_type]
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
    redispatch = op.redispatch
    # In `x * 2` the dispatcher passes the 2 as a tensor that is marked as a number and passes it to Python as a
    # number, which redispatch refuses. Calling such an operator again with the key off accepts it, and is equivalent:
    # the operators that accept numbers for tensors are plain arithmetic, without autocast operators inside.
    tensors = [i for i in _tensors(op) if i > 0]

    def fallthrough(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for index in tensors:
            if index < len(args) and isinstance(args[index], NUMBERS):
                torch.set_autocast_enabled(device_type, False)
                try:
                    return op(*args, **kwargs)
                finally:
                    torch.set_autocast_enabled(device_type, True)
        return redispatch(keyset & below, *args, **kwargs)

    return fallthrough


def inside_operator() -> bool:
    """Whether the running operator was called by another operator's kernel, below autograd.

    In inference mode, and at the lower levels of a transform, autograd is always off, and the answer is no.
    """
    return (
        torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
        and not torch.is_inference_mode_enabled()
        and not in_transform()
    )


def register_autocast_kernel(
    op: torch._ops.OpOverload, device_type: str, kernel: Callable[..., Any]
) -> Callable[[], None]:
    """Register ``kernel(keyset, *args, **kwargs)`` for ``op`` on the autocast key; returns a function that undoes it."""
    return _register(op, kernel, AUTOCAST_KEYS[device_type])


def _register(op: torch._ops.OpOverload, kernel: Callable[..., Any], key: str) -> Callable[[], None]:
    library = Library(op.namespace, "IMPL")
    with warnings.catch_warnings():
        # torch warns once per process that one of its kernels is overridden, which is intended here
        warnings.simplefilter("ignore", UserWarning)
        library.impl(op, kernel, key, with_keyset=True, allow_override=True)
    return library._destroy


@functools.cache
def _tensors(op: torch._ops.OpOverload) -> Sequence[int]:
    """The positional arguments of ``op`` whose type is exactly Tensor."""
    arguments = op._schema.arguments
    return [
        i
        for i, argument in enumerate(arguments)
        if str(argument.type) == "Tensor" and not argument.kwarg_only
    ]


def number_places(op: torch._ops.OpOverload) -> Sequence[int]:
    """Positions at which ``op`` accepts a number instead of a tensor, but cannot be called again with that number.

    For a number among several tensors (``x % 2``, ``2 ** x``) the dispatcher passes the number to Python.
    Arithmetic can be called with it, except as first argument (``1 - x``); other operators cannot.
    """
    places = _tensors(op)
    if len(places) < 2:
        return ()
    return places[:1] if op._schema.name.removeprefix("aten::") in NUMBERS_FOR_TENSORS else places


def register_in_front_of_transforms(
    op: torch._ops.OpOverload, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Register a kernel for ``op`` that runs before any active transform of torch.func.

    ``make`` takes the kernel that runs there now and returns the new one, both called as ``f(keyset, *args,
    **kwargs)``. Only one kernel can be registered in front of an operator. Returns a function that undoes it.
    """
    return _register(op, make(_taking_numbers(op, get_kernel(op, _TRANSFORMS).call_boxed)), _TRANSFORMS)


_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"
_ARITHMETIC = ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide", "floor_divide")
NUMBERS_FOR_TENSORS = (*_ARITHMETIC, *(f"{name}_" for name in _ARITHMETIC))
"""Arithmetic that accepts numbers, and needs a kernel in front of transforms while any Python kernel is registered.
A transform wraps the tensor that stands for a number, and the tangents of such tensors; the dispatcher then fails
to convert it to a number for Python ("Cannot access data pointer"). In front of all transforms it still is a
number. The names are those of ``should_allow_numbers_as_tensors`` in torch/csrc/utils/python_arg_parser.cpp."""


def _taking_numbers(op: torch._ops.OpOverload, go_on: Callable[..., Any]) -> Callable[..., Any]:
    """Pass 0-dim tensors instead of numbers, with the same type promotion."""
    places = _tensors(op)

    def front(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(args[i], NUMBERS) for i in places):
            return with_tensors(lambda *given: go_on(keyset, *given, **kwargs), args, places)
        return go_on(keyset, *args, **kwargs)

    return front


def with_tensors(
    call: Callable[..., torch.Tensor], args: Sequence[Any], places: Sequence[int]
) -> torch.Tensor:
    """Call an elementwise operator with 0-dim tensors instead of the numbers at ``places``, with the same type promotion."""
    other = next(arg for arg in args if isinstance(arg, torch.Tensor))
    if other.dim() == 0:  # a 0-dim tensor would take part in type promotion as much as this one
        lifted = other.unsqueeze(0)
        out = with_tensors(call, [lifted if arg is other else arg for arg in args], places)
        return other if out is lifted else out.squeeze(0)
    given = list(args)
    for place in places:
        value = given[place]
        if not isinstance(value, NUMBERS):
            continue
        dtype = torch.result_type(other, value)
        if dtype is other.dtype:  # the number does not decide the dtype, so it may keep all its digits
            dtype = next(exact for kind, exact in _EXACT.items() if isinstance(value, kind))
        given[place] = torch.full((), value, dtype=dtype, device="cpu")
    return call(*given)


in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether this thread is inside a transform of torch.func, which owns the tensors there."""
