"""The casts of O1: in force from ``initialize`` until the handle is deactivated, in all code.

castwise runs them below Python, except for what is no operator of ATen or takes no cast there: ``Tensor.cpu``, ``**=``, the
in-place matrix products and ``local_response_norm`` are patched while the casts are in force.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from castwise import Plan
from castwise.casting import AmbientAutocast
from castwise.compat.apex.amp._amp_state import _amp_state
from castwise.compat.apex.amp.functions import patch
from castwise.errors import StateError
from castwise.plans.rules import overrides

__all__ = ["FORMATS", "Ambient", "WeightCache"]

FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""What half may mean, and castwise's name of it."""
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


def _messages(device_type: str) -> dict[str, str]:
    """Apex's words for what it bans."""
    rows = overrides("apex", (), device_type).values()
    banned = [row.op for row in rows if row.rule == "banned"]
    return {op: f"Cannot call in-place method {op} on fp16 Tensors." for op in banned} | {
        "binary_cross_entropy": _BCE
    }


class Ambient(AmbientAutocast):
    """Apex's casts on one device type, for the whole process.

    Args:
        device_type: Whose tensors are cast.
        dtype: fp16, as Apex has it, or bf16.
        allow_banned: Run binary_cross_entropy in fp32 instead of raising.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, allow_banned: bool = False) -> None:
        allowed = (("binary_cross_entropy", "fp32"),) if allow_banned else ()
        plan = Plan(compute=FORMATS[dtype], rules="apex", ops=allowed)
        super().__init__(plan, device_type, messages=_messages(device_type))
        self._undo: list[Callable[[], None]] = []

    def enter(self) -> None:
        """Put the casts in force; again after :meth:`leave`."""
        super().enter()
        for (owner, name), make in _PATCHES.items():
            original = getattr(owner, name)
            self._undo.append(patch(owner, name, functools.wraps(original)(make(original, self.device_type))))

    def leave(self) -> None:
        """End the casts; nothing of them stays.

        Raises:
            StateError: From another thread than they began on, or inside a block that was entered after them.
        """
        try:
            super().leave()
        except StateError as error:
            raise StateError(f"handle._deactivate(): {error}") from None
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


class WeightCache:
    """Forward hooks of a model: inside one call a weight is cast once.

    Between calls nothing is kept, so that weights may change by any means: a copy that outlived its weight's change was
    one of Apex's defects. Nor is anything kept where no gradient is wanted, since such a copy has no graph. They hold
    nothing, so that models pickle and copy; a copy that outlives the casts finds no handle.
    """

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and self._wanted():
            torch.set_autocast_cache_enabled(True)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook; runs after an exception too."""
        if not torch.compiler.is_compiling() and self._wanted():
            torch.set_autocast_cache_enabled(False)
            _amp_state.handle._clear_cache()

    @staticmethod
    def _wanted() -> bool:
        return _amp_state.handle is not None and bool(_amp_state.handle.has_cache)


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
