"""Properties of operators, such as names and kinds of overloads, and of the tensors that operators take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Literal, TypeAlias

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

OpOverload: TypeAlias = torch._ops.OpOverload
READ: OpOverload = torch.ops.aten._local_scalar_dense.default
"""The operator by which ``item()`` and conversions to a Python number read a tensor."""


def overload_kind(overload: OpOverload) -> Literal["functional", "in_place", "out", "other"]:
    """Classify an operator overload by the arguments that it writes to.

    Args:
        overload: An overload such as ``torch.ops.aten.exp.default``.

    Returns: ``functional`` if the overload takes tensors and writes to none of them. ``in_place`` if it writes only
    to its first argument and its name ends in an underscore. ``out`` if it writes only to keyword-only arguments.
    ``other`` for everything else, such as TorchScript's overloads on numbers.
    """
    arguments = overload._schema.arguments
    if not any("Tensor" in str(argument.type) for argument in arguments):
        return "other"
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if not written:
        return "functional"
    if all(argument.kwarg_only for argument in written):
        return "out"
    if overload._schema.name.endswith("_") and len(written) == 1 and written[0].name == arguments[0].name:
        return "in_place"
    return "other"


def argument_names(overload: OpOverload) -> list[str]:
    """Return the names of an operator's arguments, in order."""
    return [argument.name for argument in overload._schema.arguments]


def is_composite(overload: OpOverload) -> bool:
    """Whether an overload is implemented by calls of other operators, which torch.autocast then casts one by one."""
    name: str = overload.name()
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


_COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
"""The namespaces of operators that communicate, so that ranks wait for each other."""


def operator_name(value: object) -> str:
    """Return the name by which a plan refers to an operator of ``torch.ops`` or a ``torch.library.custom_op``.

    The name is empty for any other object, and for operators that communicate between ranks.
    """
    from torch._library.custom_ops import CustomOpDef

    if isinstance(value, torch._ops.OpOverload):
        name = value.name().partition(".")[0]
    elif isinstance(value, torch._ops.OpOverloadPacket):
        name = value._qualified_op_name
    elif isinstance(value, CustomOpDef):
        name = value._qualname
    else:
        return ""
    space = name.partition("::")[0]
    return "" if space in _COLLECTIVE else name.removeprefix("aten::")


def plain_tensors(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all tensors are plain tensors or parameters with values.

    False if there is another subclass, a meta tensor, or a wrapper of a transform of torch.func.
    """
    return all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not tensor.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        for tensor in tensors
    )


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that ``tensor`` is a view of, or ``tensor`` itself if it is not a view."""
    return tensor if tensor._base is None else tensor._base


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hide the operators inside a ``with`` block from modes, and their saved tensors from saved-tensor hooks.

    The default device of ``torch.set_default_device`` and ``with torch.device(...)`` stays in force.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunctionSubclass())
        stack.enter_context(_only_default_device())
        stack.enter_context(_disable_current_modes())
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
            )
        yield


@contextlib.contextmanager
def _only_default_device() -> Iterator[None]:
    """Disable all ``TorchFunctionMode`` inside a ``with`` block, except for the one that applies the default device."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    kept = [mode for mode in modes if isinstance(mode, DeviceContext)]
    for mode in kept:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)


def default_device_of(frame: FrameType) -> torch.device | None:
    """Return the default device that torch applies to a call in a stack frame, or None in any other frame.

    Under ``torch.set_default_device`` and ``with torch.device(...)``, torch calls each of its functions from a frame of
    its own, which adds the device to the arguments of functions that create tensors.
    """
    mode = frame.f_locals.get("self") if frame.f_code.co_name == "__torch_function__" else None
    return mode.device if isinstance(mode, DeviceContext) else None


def without_transforms(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[int, int]]:
    """Unwrap a tensor from all transforms of torch.func.

    Returns:
        The innermost tensor, and the dimension that each ``vmap`` maps over, by the level of the ``vmap``.
    """
    api, dims = torch._C._functorch, {}
    while api.is_functorch_wrapped_tensor(tensor):
        if api.is_batchedtensor(tensor):
            dims[api.maybe_get_level(tensor)] = api.maybe_get_bdim(tensor)
        tensor = api.get_unwrapped(tensor)
    return tensor, dims


def operator_names(namespace: str) -> frozenset[str]:
    """Return the names of all operator overloads that are registered under a namespace, such as ``aten::exp.out``."""
    return frozenset(
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")
    )
