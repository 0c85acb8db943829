"""The same training without castwise: fp32 weights, torch.autocast and a loss scale by hand."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import castwise
from tests.here import DEVICE
from tests.lifecycle.kinds import Kind, optimizers

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass
class Scale:
    """A loss scale that changes as torch's does."""

    value: float
    interval: int
    finite: int = 0

    def update(self, found_inf: bool) -> None:
        """Update the scale at the end of a window."""
        self.finite = 0 if found_inf else self.finite + 1
        if found_inf:
            self.value *= 0.5
        elif self.finite == self.interval:
            self.value, self.finite = 2 * self.value, 0


def can_follow(plan: castwise.Plan, kind_name: str) -> bool:
    """Return whether torch.autocast and masters by hand give the same bits as the plan."""
    if kind_name == "lstm" and plan.compute in (
        ("fp16",) if castwise.core._torch.cpu.cpu_has_bf16() else ("fp16", "bf16")
    ):
        return False  # torch.autocast cannot run this LSTM on this CPU
    regions = all(
        region.is_type and region.params == "fp32" and not region.compute for region in plan.regions
    )
    native = plan.compute == "fp32" or plan.rules == "native"
    return native and not plan.ops and regions and (plan.keeps_masters or not plan.stores_low)


class Twin:
    """A model in fp32 with optimizers, trained by the current plan without castwise.

    Attributes:
        model: Its parameters are the masters where the plan stores low.
        low: The copy that runs in that case; its buffers are the model's.
    """

    def __init__(self, kind: Kind, optimizer: str) -> None:
        self.model = kind.build()
        self.optimizers = optimizers(self.model, optimizer)
        self.plan: castwise.Plan | None = None
        self.low: nn.Module | None = None
        self.scale: Scale | None = None
        self.flags: list[list[dict[str, Any]]] = []
        self.good: dict[str, Tensor] | None = None
        """Floating buffers at the start of the first forward since the last step."""

    # --- the plan -----------------------------------------------------------------------------------------

    def prepare(self, plan: castwise.Plan) -> None:
        """Train by this plan from now on."""
        self.plan = plan
        self.scale = None
        if plan.loss_scale is not None:
            self.scale = Scale(plan.loss_scale.init, plan.loss_scale.interval)
        if plan.memory_format == "channels_last":
            self._lay_out(torch.channels_last)
        if plan.optimizer == "fused":
            self.flags = [[dict(group) for group in optimizer.param_groups] for optimizer in self.optimizers]
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["fused"], group["foreach"] = True, False
                self._count_steps_on(optimizer, None)
        if plan.stores_low:
            self.low = copy.deepcopy(self.model)
            for module in self.low.modules():
                if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                    for parameter in module.parameters(recurse=False):
                        parameter.grad = None
                        if parameter.is_leaf:
                            parameter.data = parameter.data.to(_LOW[plan.compute])
                            parameter.grad_dtype = torch.float32

    def close(self) -> None:
        """Train on in fp32."""
        if self.plan is None:
            return
        if self.plan.memory_format == "channels_last":
            self._lay_out(torch.contiguous_format)
        for optimizer, groups in zip(self.optimizers, self.flags, strict=False):
            for group, former in zip(optimizer.param_groups, groups, strict=True):
                group["fused"], group["foreach"] = former["fused"], former["foreach"]
            self._count_steps_on(optimizer, None if groups[0]["fused"] else "cpu")
        self.plan, self.low, self.scale, self.flags, self.good = None, None, None, [], None

    def _count_steps_on(self, optimizer: torch.optim.Optimizer, device: str | None) -> None:
        """Move step counters where the kernels count steps: fused kernels on the device (None), others on the host."""
        for parameter, state in optimizer.state.items():
            if "step" in state:
                state["step"] = state["step"].to(device or parameter.device)

    def _lay_out(self, memory_format: torch.memory_format) -> None:
        self.model.to(memory_format=memory_format)
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[key] = torch.empty_like(parameter, requires_grad=False).copy_(value)

    # --- training -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[nn.Module]:
        """Provide the module to run, with the masters' values; copy its buffers to the model afterwards."""
        if self.low is None:
            yield self.model
            return
        with torch.no_grad():
            for low, master in zip(self.low.parameters(), self.model.parameters(), strict=True):
                low.copy_(master)
            for low, own in zip(self.low.buffers(), self.model.buffers(), strict=True):
                low.copy_(own)
        self.low.train(self.model.training)
        try:
            yield self.low
        finally:
            for low, own in zip(self.low.buffers(), self.model.buffers(), strict=True):
                own.copy_(low)

    def forward(self, x: Tensor) -> Tensor:
        """Run the model by the plan."""
        plan = self.plan
        if self.good is None and self.model.training:
            self.good = self._buffers()
        with self.running() as module:
            if plan is None or plan.compute == "fp32":
                return module(x)
            dtype = _LOW[plan.compute]
            if plan.stores_low and x.is_floating_point():
                x = x.to(dtype)
            with torch.autocast(DEVICE, dtype):
                return module(x).float()

    def backward(self, loss: Tensor) -> None:
        """Add scaled gradients."""
        (loss if self.scale is None else loss * self.scale.value).backward()
        if self.low is not None:
            for low, master in zip(self.low.parameters(), self.model.parameters(), strict=True):
                master.grad = low.grad

    def step(self, together: bool, max_norm: float | None) -> None:
        """Unscale, clip, step or skip, and clear, which ends the window."""
        groups = [self.optimizers] if together else [[optimizer] for optimizer in self.optimizers]
        found = False
        for several in groups:
            params = [p for o in several for group in o.param_groups for p in group["params"]]
            grads = [p.grad for p in params if p.grad is not None]
            if self.scale is not None:
                for grad in grads:
                    grad *= 1 / self.scale.value
            finite = self.plan is None or all(math.isfinite(float(grad.abs().sum())) for grad in grads)
            found = found or not finite
            if max_norm is not None and finite:
                nn.utils.clip_grad_norm_(params, max_norm)
            if finite:
                for optimizer in several:
                    optimizer.step()
        if self.scale is not None:
            self.scale.update(found)
        if found and self.good is not None:
            self._put_back(self.good)
        self.good = None
        self.zero_grad()

    def _buffers(self) -> dict[str, Tensor]:
        floating = ((name, b) for name, b in self.model.named_buffers() if b.is_floating_point())
        return {name: buffer.clone() for name, buffer in floating}

    def _put_back(self, good: dict[str, Tensor]) -> None:
        """Restore the buffers that the skipped step made non-finite."""
        for name, buffer in self.model.named_buffers():
            if name in good and not buffer.isfinite().all():
                buffer.copy_(good[name])

    def zero_grad(self) -> None:
        """Clear gradients."""
        self.model.zero_grad()
        if self.low is not None:
            self.low.zero_grad()

    # --- taking over --------------------------------------------------------------------------------------

    def take(self, weights: dict[str, Tensor], states: Sequence[dict[str, Any]]) -> None:
        """Take over another training's weights and optimizer states, in fp32, by value."""
        with torch.no_grad():
            own = self.model.state_dict()
            for name, value in weights.items():
                own[name].copy_(value)
        self.good = None if self.good is None else self._buffers()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            load_state(optimizer, state)


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state by value, whatever kernel it was saved under."""
    state = copy.deepcopy(state)
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        group.update({key: own[key] for key in ("fused", "foreach") if key in own})
    optimizer.load_state_dict(state)
