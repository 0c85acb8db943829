"""Properties of operators: overloads, names and kinds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

OpOverload: TypeAlias = torch._ops.OpOverload


def overload_kind(overload: OpOverload) -> Literal["functional", "in_place", "out", "other"]:
    """Classify an overload by how it uses its arguments.

    Args:
        overload: Such as ``torch.ops.aten.exp.default``.

    Returns:
        ``functional``: takes tensors and writes to none. ``in_place``: writes to its first argument and its name
        ends in an underscore. ``out``: writes to keyword-only results. ``other``: anything else, such as
        TorchScript's overloads on numbers.
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
    """Names of an operator's arguments, in order."""
    return [argument.name for argument in overload._schema.arguments]


def is_composite(overload: OpOverload) -> bool:
    """Whether an overload is composed of other operators, which torch.autocast then casts one by one."""
    name: str = overload.name()
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


_COLLECTIVE = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
"""Namespaces of operators in which ranks wait for each other."""


def operator_name(value: object) -> str:
    """The name in plans of an operator of ``torch.ops`` or a ``torch.library.custom_op``; empty for anything else.

    It is also empty for operators in which ranks wait for each other.
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
    """Whether tensors hold plain values: no subclass with its own operators, no meta tensor, none inside a transform."""
    return all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and not tensor.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        for tensor in tensors
    )


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that another is a view of; itself if it is not a view."""
    return tensor if tensor._base is None else tensor._base


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Context whose operators are hidden from modes, and whose saved tensors are hidden from hooks."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)
            )
        yield


def without_transforms(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[int, int]]:
    """The tensor inside torch.func's transforms, with the dimension that each level of ``vmap`` maps over."""
    api, dims = torch._C._functorch, {}
    while api.is_functorch_wrapped_tensor(tensor):
        if api.is_batchedtensor(tensor):
            dims[api.maybe_get_level(tensor)] = api.maybe_get_bdim(tensor)
        tensor = api.get_unwrapped(tensor)
    return tensor, dims


def operator_names(namespace: str) -> frozenset[str]:
    """Every operator registered under a namespace, with overload, as ``aten::exp.out``."""
    return frozenset(
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")
    )
