"""Create the scaler of an :class:`~castwise.Amp`, which scales losses or only skips steps that are not finite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from castwise.core import masters
from castwise.core.model.stored import is_cast, say_cast
from castwise.core.plans.plan import Plan
from castwise.core.scaler import GradScaler, StepGuard
from castwise.errors import PlanError, StateError

_ALLOWED = ("skip", "raise", "allow")


def scaler_for(
    plan: Plan, device_type: str, agree: Callable[[torch.Tensor], torch.Tensor], nonfinite: str, patience: int
) -> GradScaler:
    """Create the scaler for a plan.

    Args:
        plan: The plan.
        device_type: Device of the gradients.
        agree: A function that replaces a flag for non-finite gradients by its maximum over all ranks.
        nonfinite: As for :class:`castwise.Amp`.
        patience: As for :class:`castwise.Amp`.

    Raises:
        PlanError: A value is not allowed, or not with this plan.
    """
    if nonfinite not in _ALLOWED:
        raise PlanError(
            f"Amp(nonfinite={nonfinite!r}) is not allowed. Allowed: {', '.join(map(repr, _ALLOWED))}."
        )
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        raise PlanError(f"Amp(patience={patience!r}) is not allowed. Allowed: a whole number >= 1.")
    refuse = nonfinite == "raise"
    if plan.loss_scale is None:
        if nonfinite == "allow":
            return GradScaler(device_type, enabled=False)
        return StepGuard(device_type, refuse=refuse, patience=patience, reduce=agree)
    if nonfinite == "allow":
        raise PlanError(
            f"Amp({str(plan)!r}, nonfinite='allow'): a loss scale is adjusted by skipping steps that are not finite. Allowed "
            "with this plan: 'skip', 'raise'."
        )
    return GradScaler.from_loss_scale(
        plan.loss_scale,
        device=device_type,
        reduce=agree,
        allow_fp16_grads=plan.stores_low and not plan.keeps_masters,
        patience=1 if refuse else patience,
    )


def give_late_masters(plan: Plan, optimizer: Optimizer) -> bool:
    """Give fp32 masters to parameters that were added or unfrozen since the last step, before gradients are unscaled.

    Returns:
        Whether there were such parameters.

    Raises:
        StateError: A parameter has an fp16 gradient, and either was cast since it was prepared, or belongs to a plan
            that keeps parameters in fp32.
    """
    attachment = masters.attachment_of(optimizer)
    own = (p for group in optimizer.param_groups for p in group["params"] if masters.model_param_of(p) is p)
    for parameter in own:
        if parameter.grad is None or parameter.grad.dtype is not torch.float16:
            continue
        shape = f"a parameter of shape {tuple(parameter.shape)}"
        if is_cast(parameter):
            raise StateError(f"step({type(optimizer).__name__}): {say_cast(shape, parameter)}")
        if not plan.stores_low:
            raise StateError(
                f"step({type(optimizer).__name__}): {shape} has an fp16 gradient, which cannot be divided by the loss scale without "
                f"loss; the plan {plan} keeps parameters in fp32. Store it in fp32 (.float()) and leave casting to the plan, or use the "
                "plan 'fp16-master', which trains fp16 weights with fp32 masters."
            )
    if attachment is None:
        return False
    before = len(attachment.masters)
    attachment.scan()
    return len(attachment.masters) > before
