"""Switch an existing optimizer to its fused kernel: one pass over the parameters instead of one per operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from castwise import _torch
from castwise.errors import DeviceError
from castwise.masters import restride_state

__all__ = ["can_fuse", "check_fused", "fuse"]

_FUSED: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW, Adagrad)
_DEVICES = ("cpu", "cuda", "xpu", "mps")


def can_fuse(optimizer: Optimizer) -> bool:
    """Whether torch has a fused kernel for this very class and the devices and kinds of its parameters."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return (
        type(optimizer) in _FUSED
        and all(
            p.device.type in _DEVICES and p.is_floating_point() and p.layout is torch.strided
            for p in parameters
        )
        and not _unfit_dtensors(optimizer)
    )


def _unfit_dtensors(optimizer: Optimizer) -> bool:
    """Whether DTensors stand in the way: torch fuses them for Adam alone, and not in a group with plain tensors."""
    kinds = [{hasattr(p, "device_mesh") for p in group["params"]} for group in optimizer.param_groups]
    known = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return any(True in kind and (len(kind) > 1 or not known) for kind in kinds)


def check_fused(optimizer: Optimizer) -> None:
    """See that an optimizer has a fused kernel.

    Raises:
        DeviceError: It has none.
    """
    if type(optimizer) in _FUSED and _unfit_dtensors(optimizer):
        raise DeviceError(
            f"Plan: optimizer='fused', but torch fuses DTensors for Adam and AdamW alone, and not in one parameter group with plain "
            f"tensors, and this {type(optimizer).__name__} has such. Give it groups of their own, or use optimizer='as_given'."
        )
    if not can_fuse(optimizer):
        names = ", ".join(cls.__name__ for cls in _FUSED)
        raise DeviceError(
            f"Plan: optimizer='fused', but {type(optimizer).__name__} has no fused kernel here; torch has one for {names}. "
            "Use one of these, or optimizer='as_given'."
        )


def fuse(optimizer: Optimizer) -> Callable[[], None]:
    """Use the fused kernel from the next step on, keeping all state.

    State is brought into the strides of its parameter, which the fused kernels assume and do not check.

    Returns:
        What undoes it, as far as state that came meanwhile allows: the flags, and the form of ``step``.

    Raises:
        DeviceError: An optimizer without a fused kernel.
    """
    check_fused(optimizer)
    alive = weakref.ref(optimizer)
    tables = (optimizer.defaults, *optimizer.param_groups)
    flags: list[dict[str, Any]] = [
        {name: table[name] for name in ("fused", "foreach") if name in table} for table in tables
    ]
    first = optimizer.defaults.get("fused")
    forget = _torch.mark_fused(optimizer)
    for table in tables:
        table["fused"], table["foreach"] = True, False
    restride_state(optimizer)
    for parameter, state in optimizer.state.items():
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)

    def undo() -> None:
        target = alive()
        if target is None:
            return
        forget()
        for table in (target.defaults, *target.param_groups):
            known = next((k for t, k in zip(tables, flags, strict=True) if t is table), flags[0])
            for name in ("fused", "foreach"):
                table.pop(name, None)
            table.update(known)
        if not first:
            for state in target.state.values():
                if "step" in state and not target.defaults.get("capturable", False):
                    state["step"] = state["step"].cpu()

    return undo
