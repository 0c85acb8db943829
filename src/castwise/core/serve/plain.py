"""Put a copy of a model under a plan, and take the plan off again without widening the weights."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from castwise.core.model.arrival import widen_for
from castwise.core.model.copying import copy_of
from castwise.core.model.resolve import named_tensors
from castwise.core.plans.plan import Plan
from castwise.core.ranks import ALONE
from castwise.core.session import Amp
from castwise.core.session.storage import silent_about_rounding
from castwise.errors import StateError


def check(call: str, model: nn.Module) -> None:
    """Raise if a model cannot be copied for inference.

    Raises:
        StateError: The model is in training mode, prepared, or without memory.
    """
    kind = type(model).__name__
    empty = next((name for name, tensor in named_tensors(model) if tensor.is_meta), None)
    if empty is not None:
        raise StateError(
            f"{call}: {empty} of this {kind} is on the meta device and has no values; give it memory with model.to_empty(device=...), "
            "and load its weights"
        )
    training = next((path for path, module in model.named_modules() if module.training), None)
    if training is not None:
        which = f"{training} of this {kind}" if training else f"this {kind}"
        raise StateError(
            f"{call}: {which} is in training mode, where dropout and norm layers compute something else; call model.eval() first"
        )
    if Amp.of(model) is not None:
        raise StateError(
            f"{call}: this {kind} is prepared; call amp.close() first, which leaves its trained weights in fp32, or give a model "
            "that was loaded from amp.model_state_dict(model)"
        )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first tensor, or the CPU if it has none."""
    return next((tensor.device for _, tensor in named_tensors(model)), torch.device("cpu"))


def of_the_model(plan: Plan, call: str) -> Plan:
    """Return the part of a plan that a model in inference can hold: no compiler, optimizer, loss scale or setting of the process.

    Warns:
        UserWarning: The plan changes the precision of fp32 products, which is a setting of the process.
    """
    settings = [
        f"{name}={value!r}"
        for name in ("fp32_matmul", "fp32_conv")
        if (value := getattr(plan, name)) in ("tf32", "bf16")
    ]
    if settings:
        warnings.warn(
            f"{call}: {' and '.join(settings)} of the plan concerns the whole process and is no part of the result; set it where the "
            "result runs, in torch.backends",
            stacklevel=4,
        )
    return dataclasses.replace(
        plan, compile="as_given", optimizer="as_given", loss_scale=None, fp32_matmul="as_is", fp32_conv="as_is", host_memory="as_given",
    )  # fmt: skip


@contextlib.contextmanager
def copied_under(model: nn.Module, plan: Plan) -> Iterator[nn.Module]:
    """Yield a copy of a model under a plan; afterwards the plan is off, and tensors taken from the copy are as the plan stores them."""
    amp = Amp(plan, device=device_of(model), group=ALONE)
    copied = copy_of(model)
    try:
        amp.prepare(copied, inference=True, widen=widen_for(plan, copied, serves=True))
        yield copied
    finally:
        with silent_about_rounding():
            amp.close()


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers, by name, as new tensors that share memory with them."""
    return {name: _alias(tensor) for name, tensor in named_tensors(model)}


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().view_as(tensor)
    return nn.Parameter(plain, requires_grad=False) if isinstance(tensor, nn.Parameter) else plain
