"""Switch an existing optimizer to its fused kernel, which reads the parameters once instead of once per operation."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from castwise.core import _torch
from castwise.core.devices import has_fused
from castwise.core.masters import restride_state
from castwise.core.plans.formats import LOW_DTYPES
from castwise.errors import DeviceError

_FUSED: dict[type[Optimizer], str] = {
    SGD: "_fused_sgd_", Adam: "_fused_adam_", AdamW: "_fused_adamw_", Adagrad: "_fused_adagrad_"
}  # fmt: skip
"""The optimizers that have a fused kernel on some device, with the name of the kernel."""


def can_fuse(optimizer: Optimizer) -> bool:
    """Whether torch has a fused kernel for an optimizer's exact class and for the devices and kinds of its parameters."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    kernel = _FUSED.get(type(optimizer))
    return (
        kernel is not None
        and all(
            has_fused(kernel, p.device.type) and p.is_floating_point() and p.layout is torch.strided
            for p in parameters
        )
        and not _unfit_dtensors(optimizer)
    )


def is_fused(optimizer: Optimizer) -> bool:
    """Whether an optimizer already steps with its fused kernel."""
    return all(group.get("fused") for group in optimizer.param_groups)


def _unfit_dtensors(optimizer: Optimizer) -> bool:
    """Whether an optimizer has DTensors with which torch's fused kernel does not work.

    It works with them for Adam and AdamW only, and not in a parameter group that also has plain tensors.
    """
    kinds = [{hasattr(p, "device_mesh") for p in group["params"]} for group in optimizer.param_groups]
    known = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return any(True in kind and (len(kind) > 1 or not known) for kind in kinds)


def check_fused(optimizer: Optimizer) -> None:
    """Raise if an optimizer has no fused kernel.

    Raises:
        DeviceError: The optimizer has no fused kernel.
    """
    if type(optimizer) in _FUSED and _unfit_dtensors(optimizer):
        raise DeviceError(
            f"Plan: optimizer='fused', but torch fuses DTensors only for Adam and AdamW and not in one parameter group with "
            f"plain tensors, and this {type(optimizer).__name__} mixes them. Put DTensors into separate parameter groups, "
            f"or use "
            f"optimizer='as_given'."
        )
    if not can_fuse(optimizer):
        kinds = sorted({p.device.type for group in optimizer.param_groups for p in group["params"]})
        names = [
            cls.__name__ for cls, kernel in _FUSED.items() if all(has_fused(kernel, kind) for kind in kinds)
        ]
        raise DeviceError(
            f"Plan: optimizer='fused', but {type(optimizer).__name__} has no fused kernel; on {' and '.join(kinds)} torch has "
            f"fused kernels for {', '.join(names) or 'no optimizer'}. Use "
            f"{'one of these optimizers, or ' * bool(names)}optimizer='as_given'."
        )


def fuses_low(optimizer: Optimizer, device_type: str) -> bool:
    """Whether the fused kernel of an optimizer updates parameters that are stored in bf16 or fp16 correctly.

    Before torch 2.14, fused SGD on a CPU silently leaves most elements of such parameters unchanged.
    """
    return (
        not (isinstance(optimizer, SGD) and device_type == "cpu") or _torch.optimizers.fused_sgd_updates_low()
    )


def check_updates(optimizer: Optimizer) -> None:
    """Raise if an optimizer's kernel does not update parameters in the format in which they are stored.

    A warning is issued if ``eps`` is zero in fp16, as Adam's usual 1e-8 is. An fp16 element whose gradient is zero then
    becomes 0 / 0.

    Raises:
        DeviceError: The optimizer is fused, and :func:`fuses_low` is false for some of its parameters.
    """
    _check_eps(optimizer)
    for group in optimizer.param_groups:
        low = {
            p.dtype
            for p in group["params"]
            if p.requires_grad and p.dtype in LOW_DTYPES and not fuses_low(optimizer, p.device.type)
        }
        if group.get("fused") and low:
            raise DeviceError(
                f"prepare: torch's fused SGD does not update {str(low.pop()).removeprefix('torch.')} parameters on a CPU. Use optimizer='as_given' with an "
                "SGD that is not fused, or a plan that keeps fp32 masters or parameters."
            )


_DIVIDE = (Adam, AdamW, Adagrad, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop)
"""torch's optimizers that divide by a root of squared gradients plus ``eps``, in the format of the parameters."""


def _check_eps(optimizer: Optimizer) -> None:
    if type(optimizer) not in _DIVIDE:
        return
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if (
            not isinstance(eps, float)
            or eps <= 0.0
            or torch.tensor(eps, dtype=torch.float16, device="cpu") != 0.0
        ):
            continue
        if any(p.requires_grad and p.dtype is torch.float16 for p in group["params"]):
            warnings.warn(
                f"prepare: eps={eps:g} of this {type(optimizer).__name__} is zero in fp16, in which its parameters and their state are "
                "stored: weights whose gradient is zero become NaN at the first step. Set eps=1e-4, or use the plan 'fp16-master'.",
                stacklevel=6,
            )
            return


def fuse(optimizer: Optimizer, log: Callable[[Callable[[], None]], object]) -> None:
    """Make an optimizer use its fused kernel from the next step on, and keep all its state.

    State tensors get the strides of their parameter, which the fused kernels assume and do not check.

    Args:
        optimizer: An optimizer whose class has a fused kernel.
        log: A function that is called before anything is changed, with a function that undoes the change. Undoing
            restores the options of all parameter groups, also of those added since, and converts state to the form of
            the former kernel. The optimizer may have stepped in between. It is referenced weakly.

    Raises:
        DeviceError: The optimizer has no fused kernel; nothing was changed.
    """
    check_fused(optimizer)
    former = [_flags(group) for group in (optimizer.defaults, *optimizer.param_groups)]
    log(functools.partial(_unfuse, weakref.ref(optimizer), former, _torch.optimizers.fused_marks(optimizer)))
    optimizer.register_load_state_dict_post_hook(_use_fused)
    optimizer.defaults["fused"], optimizer.defaults["foreach"] = True, False
    _use_fused(optimizer)
    _torch.optimizers.mark_fused(optimizer)


def _use_fused(optimizer: Optimizer) -> None:
    """Set the options of all parameter groups, also after they were loaded, and give the state the form of the fused kernel."""
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    restride_state(optimizer)
    for parameter, state in optimizer.state.items():
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)


def _flags(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("fused", "foreach") if name in group}


def _unfuse(
    reference: weakref.ref[Optimizer], former: list[dict[str, Any]], unmark: Callable[[], None]
) -> None:
    optimizer = reference()
    if optimizer is None:
        return
    _torch.hooks.remove_hooks(optimizer, _use_fused)
    groups = optimizer.param_groups
    added = [former[0]] * (len(groups) + 1 - len(former))  # groups that use the defaults
    for group, flags in zip((optimizer.defaults, *groups), (*former, *added), strict=False):
        for name in ("fused", "foreach"):
            group.pop(name, None)
        group.update(flags)
    for group in groups:
        if group.get("fused") or group.get("capturable"):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:  # torch's kernels that are not fused keep the step count on the host
                state["step"] = torch.as_tensor(state["step"], device="cpu", dtype=_step_dtype())
    unmark()


def _step_dtype() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
