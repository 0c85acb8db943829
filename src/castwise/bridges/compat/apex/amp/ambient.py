"""The casts that optimization level ``O1`` inserts around operators, as autocast does.

The casts are active in all code, from ``initialize`` until their handle is deactivated. castwise inserts them in torch's
dispatcher. A few functions cannot be cast there, and are patched in Python while the casts are active: ``Tensor.cpu``, ``**=``,
the in-place matrix products, ``local_response_norm``, and operators such as ``x += y``. For the last, ``x`` becomes a new fp32
tensor if ``x`` is half and ``y`` is fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from castwise import Plan
from castwise.bridges.compat.apex.amp._amp_state import _amp_state
from castwise.bridges.compat.apex.amp.functions import patch
from castwise.core.casting import AmbientAutocast
from castwise.core.plans.rules import overrides

__all__ = ["FORMATS", "begin_caching", "casts_of_o1", "end_caching", "patch_torch"]

FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""The dtypes that "half" can mean, with castwise's names for them."""
_MEET = (*FORMATS, torch.float32)
_BCE = (
    "\namp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` "
    "It requires that the output of the previous function be already a FloatTensor. \n\n"
    "Most models have a Sigmoid right before BCELoss. In that case, you can use\n"
    "    torch.nn.BCEWithLogitsLoss\nto combine Sigmoid+BCELoss into a single layer "
    "that is compatible with amp.\nAnother option is to add\n"
    "    amp.register_float_function(torch, 'sigmoid')\nbefore calling `amp.init()`.\n"
    "If you _really_ know what you are doing, you can disable this warning by passing "
    "allow_banned=True to `amp.init()`."
)


def casts_of_o1(device_type: str, dtype: torch.dtype, allow_banned: bool = False) -> AmbientAutocast:
    """Return the casts of level ``O1`` for one device type, without activating them.

    With ``allow_banned``, ``binary_cross_entropy`` runs in fp32. Otherwise it raises an error.
    """
    banned = [row.op for row in overrides("apex", (), device_type).values() if row.rule == "banned"]
    messages = {op: f"Cannot call in-place method {op} on fp16 Tensors." for op in banned}
    allowed = (("binary_cross_entropy", "fp32"),) if allow_banned else ()
    plan = Plan(compute=FORMATS[dtype], rules="apex", ops=allowed)
    return AmbientAutocast(plan, device_type, messages={**messages, "binary_cross_entropy": _BCE})


def begin_caching(module: nn.Module, args: Any) -> None:
    """Turn on the cache of cast weights, as a forward pre-hook, so that each weight is cast once in a call of the model.

    Nothing is cached between calls, so that weights may change in any way. In Apex, a cached copy could outlive a change of
    its weight. Nothing is cached without gradients either, since the copy would have no autograd graph. The hook does
    nothing after the casts of ``O1`` have ended, in a copy of the model that still has the hook.
    """
    if torch.is_grad_enabled() and _caches():
        torch.set_autocast_cache_enabled(True)


def end_caching(module: nn.Module, args: Any, output: Any) -> None:
    """Empty the cache of cast weights and turn it off, as a forward hook. The hook also runs after an exception."""
    if _caches():
        torch.set_autocast_cache_enabled(False)
        _amp_state.handle._clear_cache()


def _caches() -> bool:
    handle = _amp_state.handle
    return not torch.compiler.is_compiling() and handle is not None and bool(handle.has_cache)


# --- patches ------------------------------------------------------------------------------------------------


def _is_cast(tensor: torch.Tensor, device_type: str) -> bool:
    return (
        tensor.dtype in FORMATS
        and tensor.device.type == device_type
        and torch.is_autocast_enabled(device_type)
    )


def _in_fp32(original: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def function(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(input.float() if _is_cast(input, device_type) else input, *args, **kwargs)

    return function


def _ipow(original: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def ipow(self: torch.Tensor, other: Any) -> Any:
        return self.float().pow(other) if _is_cast(self, device_type) else original(self, other)

    return ipow


def _promote(original: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def method(self: torch.Tensor, other: Any) -> Any:
        if (
            isinstance(other, torch.Tensor)
            and other.dtype in _MEET
            and other.device.type == device_type
            and _is_cast(self, device_type)
        ):
            self = self.to(torch.promote_types(self.dtype, other.dtype))
        return original(self, other)

    return method


def _match_self(original: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def match(value: Any, dtype: torch.dtype) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_floating_point() and torch.is_autocast_enabled(device_type):
            args = tuple(match(value, self.dtype) for value in args)
            kwargs = {name: match(value, self.dtype) for name, value in kwargs.items()}
        return original(self, *args, **kwargs)

    return method


_PATCHES: dict[tuple[Any, str], Callable[[Callable[..., Any], str], Callable[..., Any]]] = {
    (torch.Tensor, "cpu"): _in_fp32,
    (torch.Tensor, "__ipow__"): _ipow,
    **{(torch.Tensor, name): _promote for name in ("__iadd__", "__isub__", "__imul__", "__itruediv__")},
    **{(torch.Tensor, name): _match_self for name in ("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_")},
    (nn.functional, "local_response_norm"): _in_fp32,
}


def patch_torch(device_type: str, undo: ExitStack) -> None:
    """Patch the functions that cannot be cast in torch's dispatcher, until ``undo`` is closed."""
    for (owner, name), make in _PATCHES.items():
        original = getattr(owner, name)
        patch(owner, name, functools.wraps(original)(make(original, device_type)), undo)
