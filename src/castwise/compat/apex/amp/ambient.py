"""The casts of O1: in force from ``initialize`` until the handle is deactivated, in all code.

They run as castwise's override kernels below Python, except for what is no operator of ATen or takes no cast there:
``Tensor.cpu``, ``**=``, the in-place matrix products and ``local_response_norm`` are patched while the casts are in force.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from castwise import _torch
from castwise.casting import frames, kernels, tracing
from castwise.casting.context import override_rows
from castwise.errors import StateError
from castwise.plans import rules
from castwise.plans.plan import Plan

__all__ = ["Ambient", "WeightCache"]

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
_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_LOW = tuple(_FORMATS)


def _rows(dtype: torch.dtype, device_type: str, allow_banned: bool) -> dict[str, rules.Row]:
    """Apex's lists where they differ from torch's own on this device, with Apex's words for what is banned."""
    rows = dict(override_rows(Plan(compute=_FORMATS[dtype], rules="apex"), device_type))
    for name, row in rows.items():
        if row.rule != "banned":
            continue
        if name != "binary_cross_entropy":
            rows[name] = dataclasses.replace(
                row, message=f"Cannot call in-place method {name} on fp16 Tensors."
            )
        elif allow_banned:
            rows[name] = dataclasses.replace(row, rule="fp32", only_low=False)
        else:
            rows[name] = dataclasses.replace(row, message=_BCE)
    return rows


class Ambient:
    """Apex's casts on one device type, for the whole process.

    Args:
        device_type: Whose tensors are cast.
        dtype: fp16, as Apex has it, or bf16.
        allow_banned: Run binary_cross_entropy in fp32 instead of raising.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, allow_banned: bool = False) -> None:
        rows = _rows(dtype, device_type, allow_banned)
        self.device_type = device_type
        self.frame = kernels.frame_of(device_type, dtype, rows, cache=False)
        self._lease: kernels.Lease | None = None
        self._thread = 0
        self._depth = -1
        self._undo: list[Callable[[], None]] = []

    @property
    def entered(self) -> bool:
        """Whether the casts are in force, be they suspended or not."""
        return self._depth >= 0

    def enter(self) -> None:
        """Put the casts in force; again after :meth:`leave`."""
        tracing.get_ready_for_compile()
        _forget_in_children()
        self._lease = kernels.Lease(self.frame.rows, self.device_type)
        self._thread, self._depth = threading.get_ident(), frames.depth()
        frames.push_region(self.frame)
        frames.ambient[self.device_type] = self.frame
        for (owner, name), make in _PATCHES.items():
            self._undo.append(_patch(owner, name, make, self.device_type))
        self._undo.append(_torch.around_python_backward(self._enter_python_backward))

    def _enter_python_backward(self) -> Callable[[], None]:
        """The casts rest during backward, but a Function's own Python is code as any other, which Apex casts too."""
        device_type = self.device_type
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        assert self.frame.dtype is not None
        torch.set_autocast_dtype(device_type, self.frame.dtype)
        torch.set_autocast_enabled(device_type, True)

        def leave() -> None:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)

        return leave

    def leave(self) -> None:
        """End the casts; nothing of them stays.

        Raises:
            StateError: From another thread than they began on, or inside a region that was entered after them.
        """
        if not self.entered:
            return
        if self._thread != threading.get_ident() or frames.depth() != self._depth + 1:
            raise StateError(
                "handle._deactivate(): the casts of O1 end on the thread that they began on, and outside of any "
                "castwise.autocast or forward that was entered after them; leave those first"
            )
        frames.pop_region()
        frames.ambient.pop(self.device_type, None)
        self._depth = -1
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        if self._lease is not None:
            self._lease.close()
            self._lease = None


class WeightCache:
    """Forward hooks of a model: inside one call a weight is cast once.

    Between calls nothing is kept, so that weights may change by any means: a copy that outlived its weight's change was
    one of Apex's defects. Nor is anything kept where no gradient is wanted, since such a copy has no graph.
    """

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and frames.ambient:
            torch.set_autocast_cache_enabled(True)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook; runs after an exception too."""
        if not torch.compiler.is_compiling() and frames.ambient:
            torch.set_autocast_cache_enabled(False)
            frames.clear_weight_cache()


# --- children -----------------------------------------------------------------------------------------------


def _leave_in_child() -> None:
    """A forked worker of a DataLoader prepares data: casts belong to the training process."""
    for device_type in frames.ambient:
        torch.set_autocast_enabled(device_type, False)


@functools.cache
def _forget_in_children() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_in_child)


# --- patches ------------------------------------------------------------------------------------------------


def _patch(
    owner: Any, name: str, make: Callable[[Callable[..., Any], str], Callable[..., Any]], device_type: str
) -> Callable[[], None]:
    """Replace a method or a function; returns what puts it back."""
    own = vars(owner).get(name)
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original, device_type)))

    def undo() -> None:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo


def _is_cast(tensor: torch.Tensor, device_type: str) -> bool:
    return (
        tensor.dtype in _LOW and tensor.device.type == device_type and torch.is_autocast_enabled(device_type)
    )


def _in_fp32(original: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def function(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(input.float() if _is_cast(input, device_type) else input, *args, **kwargs)

    return function


def _cpu(original: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        source = self.float() if _is_cast(self, device_type) else self
        moved: torch.Tensor = original(source, *args, **kwargs)
        return moved

    return cpu


def _ipow(original: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def ipow(self: torch.Tensor, other: Any) -> Any:
        return self.float().pow(other) if _is_cast(self, device_type) else original(self, other)

    return ipow


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
    (torch.Tensor, "cpu"): _cpu,
    (torch.Tensor, "__ipow__"): _ipow,
    **{(torch.Tensor, name): _match_self for name in ("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_")},
    (nn.functional, "local_response_norm"): _in_fp32,
}
