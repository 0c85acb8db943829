"""Copy a model, apply a plan to the copy, run the loss and its backward, and collect the gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.model.arrival import store_, widen_, widen_for
from castwise.core.model.copying import copy_of
from castwise.core.plans.plan import Plan
from castwise.core.ranks import ALONE
from castwise.core.session import Amp
from castwise.lab.passes.emulation import EmulatedProducts
from castwise.lab.passes.isolation import copied, seed_all
from castwise.lab.passes.observers import Observer, observed
from castwise.lab.workloads.workload import check_loss, check_no_backward


class Original:
    """A copy of the user's model, of which each forward and backward pass gets its own copy.

    Tensors that the user's model stores in bf16 or fp16 are widened to fp32.

    Args:
        model: The user's model.
        call: The caller, for errors.
        device: The device to run on.
        arrived: For a model that was already widened from bf16 or fp16, the original dtypes of its tensors, by path.

    Attributes:
        model: The fp32 model.
        arrived: Original dtypes of the tensors that were bf16 or fp16, by path.

    Raises:
        WorkloadError: The model cannot be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        call: str,
        device: torch.device,
        arrived: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        self.model = copied(model, call).to(device)
        self.arrived = arrived or widen_(self.model)

    def copy(self) -> nn.Module:
        """Return a copy of the model, with each tensor stored in the dtype that it had in the user's model."""
        model = copy_of(self.model)
        store_(model, self.arrived)
        return model


@contextlib.contextmanager
def under(
    plan: Plan, model: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[Amp]:
    """Prepare a model under a plan for the block, and yield the session; other ranks do not take part.

    If the plan keeps master weights and no optimizer is given, an optimizer that changes nothing holds them, so that gradients
    are fp32 as in training.

    Raises:
        CastwiseError: The plan does not fit the model or the device.
    """
    with Amp(plan, device=device, group=ALONE) as amp:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if optimizer is None and plan.keeps_masters and trained:
            optimizer = still(model)
        amp.prepare(model, *(() if optimizer is None else (optimizer,)), widen=widen_for(plan, model))
        yield amp


def still(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of a model's trained parameters whose steps change nothing."""
    return torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.0)


def at_scale(plan: Plan, scale: float | None) -> Plan:
    """Return the plan with its loss scale started at a value, without floor and ceiling.

    The plan is returned unchanged if it has no loss scale, or if the value is None.
    """
    if scale is None or plan.loss_scale is None:
        return plan
    policy = dataclasses.replace(plan.loss_scale, init=scale, floor=None, ceiling=None)
    return dataclasses.replace(plan, loss_scale=policy)


def observed_under(
    plan: Plan, model: nn.Module, device: torch.device, *observers: Observer
) -> AbstractContextManager[None]:
    """Return a block in which observers observe a model's pass; on a CPU, fp16 products are emulated unless the plan compiles."""
    emulates = device.type == "cpu" and "fp16" in plan.formats and plan.compile == "as_given"
    return observed(model, *((EmulatedProducts(),) if emulates else ()), *observers)


def run_backward(
    amp: Amp,
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    call: str,
    seed: int | None,
) -> Tensor:
    """Compute the loss of a batch, and its backward if the loss has a graph.

    Args:
        amp: The session of the plan.
        model: Receives the gradients, which are multiplied by the loss scale.
        loss: ``loss(model, batch)`` -> scalar.
        batch: The batch, on the model's device.
        call: The caller, for errors.
        seed: Seed of random draws; None leaves the generators unchanged.

    Returns:
        The loss, detached.

    Raises:
        WorkloadError: The loss is not a scalar, or ran the backward itself.
    """
    if seed is not None:
        seed_all(seed % 2**32)
    value = loss(model, batch)
    check_no_backward(model, call)
    value = check_loss(value, call)
    if torch.is_grad_enabled():
        amp.backward(value)
    return value.detach()


def gradients_of(model: nn.Module, scale: float) -> dict[str, Tensor]:
    """Return copies of a model's gradients by parameter name: dense, in fp32 or wider, and divided by the loss scale."""
    out = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            dense = _torch.tensors.to_dense(parameter.grad).detach()
            wide = dense if dense.dtype.itemsize >= 4 else dense.float()
            out[name] = wide / scale if scale != 1.0 else wide.clone()
    return out
