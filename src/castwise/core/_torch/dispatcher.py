"""torch's dispatcher: autocast kernels of operators, and how operators treat Python numbers."""

from __future__ import annotations

import contextlib
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
"""The number types of Python that operators accept instead of tensors."""


def device_types() -> tuple[str, ...]:
    """Return the names of all device types that torch's code names; an out-of-tree device has the name of its extension."""
    names = (name.lower() for name in torch._C._autograd.DeviceType.__members__)
    return tuple(
        torch._C._get_privateuse1_backend_name() if name == "privateuse1" else name for name in names
    )


def device_key(device_type: str) -> str:
    """Return the name of a device type's dispatch key, such as ``CUDA``, or ``PrivateUse1`` under whatever name it has."""
    return str(torch._C._dispatch_key_for_device(device_type))


def _autocast_key(device_type: str) -> str:
    """Return the name of the dispatch key under which a device type's autocast kernels are registered."""
    return f"Autocast{device_key(device_type)}"


def autocast_registrations(device_type: str) -> frozenset[str]:
    """Return the names (such as ``aten::exp.out``) of the operators that have an autocast kernel on a device type."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(_autocast_key(device_type)))


def has_kernel(op: str, device_type: str) -> bool:
    """Whether a device type has a kernel, or a fallback, for an operator, given by a name such as ``aten::_fused_adam_``."""
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(op, device_key(device_type)))


def passes_autocast(device_type: str) -> bool:
    """Whether operators without an autocast kernel run while autocast is on for a device type.

    An out-of-tree device needs a fallthrough on its autocast key for that.
    """
    return bool(
        torch._C._dispatch_has_computed_kernel_for_dispatch_key("aten::relu", _autocast_key(device_type))
    )


def is_dispatched(op: torch._ops.OpOverload) -> bool:
    """Whether calls of an operator overload go through the dispatcher.

    A few, such as ``einsum.sublist``, exist for TorchScript alone.
    """
    return bool(torch._C._dispatch_has_kernel(op.name()))


def native_autocast_call(op: torch._ops.OpOverload, device_type: str) -> Callable[..., Any]:
    """Return a function that runs ``op`` as ``torch.autocast`` runs it.

    Call the function as ``f(keyset, *args, **kwargs)``. For an operator on torch's autocast lists, the function is
    torch's kernel that casts the inputs. Any other operator has only a fallthrough on the autocast key, which cannot be
    called. For such an operator the result of :func:`below_autocast_call` is returned.
    """
    key = _autocast_key(device_type)
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        parsed: Any = torch._C._parse_dispatch_key(key)  # get_kernel does not know the names of all keys
        call: Callable[..., Any] = get_kernel(op, parsed).call_boxed
        return call
    return below_autocast_call(op, device_type)


def below_autocast_call(op: torch._ops.OpOverload, device_type: str) -> Callable[..., Any]:
    """Return a function that runs ``op`` without casting, as autocast runs operators that are not on its lists.

    Call the function as ``f(keyset, *args, **kwargs)``. The function continues with the dispatch keys below the
    autocast key. Autocast stays enabled on the thread, so operators that a composite operator calls inside are still
    autocast.
    """
    key: Any = torch._C._parse_dispatch_key(_autocast_key(device_type))
    below = torch._C._dispatch_keyset_full_after(key)
    redispatch = op.redispatch
    # In `x * 2` the dispatcher holds the 2 as a tensor that is marked as a number, and passes a number to Python.
    # `redispatch` refuses numbers. Calling the operator again with autocast off accepts them. Both are equivalent,
    # since the operators that accept numbers for tensors are plain arithmetic, without autocast operators inside.
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
    """Whether the running operator was called from inside another operator's kernel, where autograd is off.

    In inference mode and inside a transform of torch.func this cannot be seen, and the answer is always False.
    """
    return (
        torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
        and not torch.is_inference_mode_enabled()
        and not in_transform()
    )


def register_autocast_kernel(
    op: torch._ops.OpOverload, device_type: str, kernel: Callable[..., Any]
) -> Callable[[], None]:
    """Register ``kernel(keyset, *args, **kwargs)`` as the autocast kernel of ``op``.

    Returns:
        A function that undoes the registration.
    """
    return _register(op, kernel, _autocast_key(device_type))


def _register(op: torch._ops.OpOverload, kernel: Callable[..., Any], key: str) -> Callable[[], None]:
    library = Library(op.namespace, "IMPL")
    with warnings.catch_warnings():
        # torch warns once per process that one of its kernels is overridden, which is intended here
        warnings.simplefilter("ignore", UserWarning)
        library.impl(op, kernel, key, with_keyset=True, allow_override=True)
    return library._destroy


_FOREACH_WRITES: dict[torch._ops.OpOverload, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    torch.ops.aten._foreach_lerp_.Scalar: lambda other: ([other], 0.5),
    torch.ops.aten._foreach_lerp_.ScalarList: lambda other: ([other], [0.5]),
    torch.ops.aten._foreach_zero_.default: lambda _: (),
}
"""In-place operators on lists of tensors whose kernel for CUDA does not count its writes, with arguments to try them. (Of all 56
that ran on an H200 with torch 2.11, these.)"""


@functools.cache
def _uncounted(device_type: str) -> tuple[torch._ops.OpOverload, ...]:
    """Try which of these operators leave autograd's version counters unchanged on a device. Nothing waits for the device."""
    found = []
    with torch.inference_mode(False), torch.no_grad():
        for op, arguments in _FOREACH_WRITES.items():
            written = [torch.zeros(1, device=device_type)]
            version = written[0]._version
            op(written, *arguments(torch.ones(1, device=device_type)))
            if written[0]._version == version:
                found.append(op)
    return tuple(found)


def count_foreach_writes(device_type: str) -> Callable[[], None]:
    """Have autograd count the writes of operators such as ``torch._foreach_lerp_``, where a device's kernels do not.

    Returns:
        A function that undoes it.
    """

    def counting(op: torch._ops.OpOverload) -> Callable[[], None]:
        key = device_key(device_type)
        write = get_kernel(op, key).call_boxed

        def kernel(keyset: Any, tensors: list[torch.Tensor], *args: Any) -> None:
            write(keyset, tensors, *args)
            torch.autograd.graph.increment_version(tensors)

        return _register(op, kernel, key)

    with contextlib.ExitStack() as undo:
        for op in _uncounted(device_type):
            undo.callback(counting(op))
        return undo.pop_all().close


@functools.cache
def _tensors(op: torch._ops.OpOverload) -> Sequence[int]:
    """Return the positions of the positional arguments of ``op`` whose type is exactly Tensor."""
    arguments = op._schema.arguments
    return [
        i
        for i, argument in enumerate(arguments)
        if str(argument.type) == "Tensor" and not argument.kwarg_only
    ]


def number_places(op: torch._ops.OpOverload) -> Sequence[int]:
    """Return the positions at which ``op`` accepts a number instead of a tensor, but cannot be called again with it.

    If a number stands in for one of several tensors (``x % 2``, ``2 ** x``), a Python kernel receives the number.
    Arithmetic operators can be called again with the number, except as the first argument (``1 - x``). Other operators
    cannot be called again with the number at all.
    """
    places = _tensors(op)
    if len(places) < 2:
        return ()
    return places[:1] if op._schema.name.removeprefix("aten::") in NUMBERS_FOR_TENSORS else places


def register_in_front_of_transforms(
    op: torch._ops.OpOverload, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Register a kernel for ``op`` that runs before any active transform of torch.func, such as ``vmap``.

    Only one such kernel can be registered for an operator.

    Args:
        op: The operator.
        make: Takes the kernel that runs there now and returns the new kernel. Both kernels are called as
            ``f(keyset, *args, **kwargs)``.

    Returns:
        A function that undoes the registration.
    """
    return _register(op, make(_taking_numbers(op, get_kernel(op, _TRANSFORMS).call_boxed)), _TRANSFORMS)


_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"
_ARITHMETIC = ("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide", "floor_divide")
NUMBERS_FOR_TENSORS = (*_ARITHMETIC, *(f"{name}_" for name in _ARITHMETIC))
"""Arithmetic operators that accept numbers instead of tensors.

While any Python kernel is registered for such an operator, it also needs a kernel in front of the transforms of
torch.func. A transform wraps the tensor that stands for a number, and the tangents of such tensors. The dispatcher then
fails to convert the wrapped tensor to a number for Python ("Cannot access data pointer"). In front of all transforms the
tensor can still be converted. The names are those of ``should_allow_numbers_as_tensors`` in
torch/csrc/utils/python_arg_parser.cpp."""


def _taking_numbers(op: torch._ops.OpOverload, go_on: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel for ``op`` that calls the kernel ``go_on`` with 0-dim tensors in place of numbers.

    The result has the dtype that it would have with the numbers.
    """
    places = _tensors(op)

    def front(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(args[i], NUMBERS) for i in places):
            return with_tensors(lambda *given: go_on(keyset, *given, **kwargs), args, places)
        return go_on(keyset, *args, **kwargs)

    return front


def with_tensors(
    call: Callable[..., torch.Tensor], args: Sequence[Any], places: Sequence[int]
) -> torch.Tensor:
    """Call an elementwise operator with 0-dim tensors in place of the numbers at ``places``.

    The result has the dtype that it would have with the numbers.
    """
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
"""Whether this thread is inside a transform of torch.func, where tensors are wrappers that the transform made."""
