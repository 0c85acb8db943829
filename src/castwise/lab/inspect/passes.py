"""Run forward and backward passes of copies of a model under plans, each from the same weights, buffers and random state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting.trees import map_tensors, to_device
from castwise.core.parallel.wrappers import unwrap
from castwise.core.plans.plan import Plan
from castwise.core.session.process import find_device
from castwise.errors import WorkloadError
from castwise.lab.parity.parity import device_of
from castwise.lab.parity.together import Looking
from castwise.lab.passes.isolation import copied, undisturbed
from castwise.lab.passes.observers import Observer
from castwise.lab.passes.passes import observed_under, run_backward, under
from castwise.lab.workloads.workload import users_code


@dataclass(frozen=True)
class Pass:
    """The result of one forward and backward pass of a copy of a model.

    Attributes:
        model: The copy, with its buffers and its gradients, which are still multiplied by the loss scale.
        loss: The loss, detached.
        scale: Loss scale of the gradients; 1 without one.
    """

    model: nn.Module
    loss: Tensor
    scale: float


class Passes:
    """Runs forward and backward passes of one model, loss and batch, inside :func:`castwise.lab.parity.together.together`.

    Every pass runs on a copy and starts from the same weights, buffers and random state. Compiled models run uncompiled, so that
    operators are visible. Each rank runs independently of the others. On a CPU fp16 products are emulated.

    Args:
        call: The caller, for errors.
        looking: The ranks and their model.
        loss: ``loss(model, batch)`` -> scalar.
        batch: The batch, on any device.
        device: The device to run on; by default that of the model's parameters.
        seed: Seed of random draws; None continues from the generators' present state.

    Raises:
        DeviceError: The device is not available.
    """

    def __init__(
        self,
        call: str,
        looking: Looking,
        loss: Callable[[nn.Module, Any], Tensor],
        batch: Any,
        device: torch.device | str | None = None,
        seed: int | None = None,
    ) -> None:
        self.call, self.loss, self.batch, self.seed = call, loss, batch, seed
        self.model, self.compiled = unwrap(looking.model), looking.compiled
        self.device = find_device(call, device, str(device_of(self.model)))

    def run(self, plan: Plan, observe: Callable[[nn.Module, Any], Observer]) -> Pass:
        """Run one forward and backward pass.

        Args:
            plan: The plan to run under; its compile setting is ignored.
            observe: Gets the copy of the model and its batch, and returns an observer of the loss and its backward.

        Raises:
            WorkloadError: The model cannot be copied, or the loss fails or is invalid.
            CastwiseError: The plan does not fit the model or the device.
        """
        plan = dataclasses.replace(plan, compile="as_given")
        failed = f"{self.call}: the model or its loss failed under {plan}"
        with users_code(failed), undisturbed(), contextlib.ExitStack() as stack:
            if _torch.dynamo.dynamo_loaded():
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            model = copied(self.model, self.call).to(self.device)
            amp = stack.enter_context(under(plan, model, self.device))
            batch = map_tensors(_own, to_device(self.batch, self.device))
            stack.enter_context(observed_under(plan, model, self.device, observe(model, batch)))
            loss = run_backward(amp, model, self.loss, batch, self.call, self.seed)
            if all(parameter.grad is None for parameter in model.parameters()):
                raise WorkloadError(
                    f"{self.call}: after loss(model, batch) and backward no parameter of the model has a gradient; the loss must "
                    "call the model that it is given, since experiments run on copies"
                )
            return Pass(model, loss, amp.get_scale())


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
