"""``colossalai.amp``: a model, an optimizer and a criterion made to train in one of three AMP modes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise import Amp
from castwise.compat.colossalai.context import ParallelMode
from castwise.compat.colossalai.core import global_context as gpc
from castwise.compat.colossalai.engine.gradient_handler import local_grad
from castwise.compat.colossalai.logging import get_dist_logger
from castwise.compat.colossalai.nn.optimizer import ColossalaiOptimizer
from castwise.compat.colossalai.plans import Recipe, recipe_of
from castwise.errors import StateError
from castwise.masters import copy_to_model

__all__ = [
    "AMP_TYPE",
    "AmpCriterion",
    "AmpOptimizer",
    "NaiveAMPOptimizer",
    "convert_to_amp",
    "convert_to_apex_amp",
    "convert_to_naive_amp",
    "convert_to_torch_amp",
    "prepare",
]

_SAVED = "castwise_amp"
"""Key of the session's state in an optimizer's; torch's optimizers pass over it."""


class AMP_TYPE(Enum):  # noqa: N801 - the name is the contract
    """The three modes."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


class AmpOptimizer(ColossalaiOptimizer):
    """An optimizer whose losses are scaled and whose steps are skipped where a gradient is not finite.

    Each step clips to the global norm ``clip_grad_norm``, or that of the recipe; 0 for none.

    Attributes:
        amp: The castwise session, for whatever it can do beyond Colossal-AI.
    """

    def __init__(self, optim: Optimizer, amp: Amp, recipe: Recipe, clip_grad_norm: float = 0.0) -> None:
        super().__init__(optim)
        self.amp = amp
        self.recipe = recipe
        self.max_norm = clip_grad_norm or recipe.clip_grad_norm

    @property
    def loss_scale(self) -> float:
        """The loss scale; synchronises with the device."""
        return self.amp.get_scale()

    def backward(self, loss: Tensor) -> None:
        """Compute scaled gradients of a loss."""
        self.amp.backward(loss)

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Compute gradients of an output whose own, scaled already, is known."""
        self.amp.scale(torch.zeros((), device=tensor.device))  # the window of the last step is over
        torch.autograd.backward(tensor, grad)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> None:
        """Unscale the gradients and clip them to a global norm, over all ranks.

        Nothing is left to do where each step clips to that norm anyway, and where it is 0.
        """
        if max_norm > 0 and max_norm != self.max_norm:
            self.amp.clip_grad_norm_(self.optim, max_norm)

    def step(self, closure: Any = None) -> Any:
        """Unscale, agree with the other ranks, clip, and step or skip."""
        if closure is not None:
            raise StateError(
                f"{type(self).__name__}.step(closure): not taken, as in Colossal-AI; use "
                "engine.optimizer.amp.step(optimizer, closure=...) of castwise"
            )
        return self._outcome(self.amp.step(self.optim, max_norm=self.max_norm or None))

    def _outcome(self, result: Any) -> Any:
        if self.recipe.verbose and result.skipped:
            get_dist_logger().info(
                f"gradient overflow: step skipped, loss scale {self.amp.get_scale():g}", ranks=[0]
            )

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the loss scale under a key of its own."""
        return {**self.optim.state_dict(), _SAVED: self.amp.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of the bare optimizer."""
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != _SAVED})
        if _SAVED in state_dict:
            self.amp.load_state_dict(state_dict[_SAVED])


class NaiveAMPOptimizer(AmpOptimizer):
    """The optimizer of the naive mode: its ``step`` tells whether it was made, and clips by itself.

    ``step()`` returns ``(True, grad_norm)``, the norm a number or None without clipping, or ``(False, None)``; with
    ``log_num_zeros_in_grad=True`` a third value, how many elements of the gradients are zero.
    """

    def _outcome(self, result: Any) -> Any:
        super()._outcome(result)
        if result.skipped:
            self.zero_grad()
            return (False, None, None) if self.recipe.counts_zeros else (False, None)
        norm = None if result.grad_norm is None else float(result.grad_norm)
        return (True, norm, self._zeros()) if self.recipe.counts_zeros else (True, norm)

    def _zeros(self) -> int:
        """Zeros in this process's gradients; each of several processes counts what it holds."""
        grads = [local_grad(p) for group in self.param_groups for p in group["params"]]
        return sum(int((grad == 0).sum()) for grad in grads if grad is not None)

    def state_dict(self) -> dict[str, Any]:
        """The keys of Colossal-AI's ``FP16Optimizer``: ``optimizer``, ``grad_scaler``, ``fp32_master_param_groups``."""
        return {
            "optimizer": self.optim.state_dict(),
            "grad_scaler": self.amp.state_dict()["scaler"] or {},
            "fp32_master_param_groups": [
                [p.detach().clone() for p in group["params"]] for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, of Colossal-AI's own, or of the bare optimizer."""
        if "optimizer" not in state_dict:
            self.optim.load_state_dict(state_dict)
            return
        self.optim.load_state_dict(state_dict["optimizer"])
        if state_dict.get("grad_scaler"):
            # Colossal-AI's own has a tensor for the scale, and no counters
            saved, session = state_dict["grad_scaler"], self.amp.state_dict()
            own = {key: saved.get(key, value) for key, value in (session["scaler"] or {}).items()}
            self.amp.load_state_dict({**session, "scaler": {**own, "scale": float(saved["scale"])}})
        for group, saved_group in zip(
            self.param_groups, state_dict.get("fp32_master_param_groups", ()), strict=False
        ):
            for parameter, values in zip(group["params"], saved_group, strict=True):
                parameter.data.copy_(values)
        copy_to_model(self.optim)


class AmpCriterion(nn.Module):
    """A criterion, any callable, that runs under the plan, as the torch mode and Apex's O1 have it."""

    def __init__(self, loss: Any, amp: Amp) -> None:
        super().__init__()
        self.loss = loss
        self.amp = amp

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss."""
        with self.amp.autocast():
            return self.loss(*args, **kwargs)


def convert_to_amp(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Any,
    mode: AMP_TYPE,
    amp_config: Mapping[str, Any] | None = None,
) -> tuple[Any, Any, Any]:
    """Make training components train in an AMP mode.

    The model comes back as the same object, made to run by the plan. Where torch.distributed is initialised all ranks
    make the call together. Prepare before DistributedDataParallel and ``torch.compile``.

    Args:
        model: On its device; an ``nn.ModuleList`` holds several stages of a pipeline.
        optimizer: Of torch, updating the model.
        criterion: Any callable that computes a loss, or None.
        mode: TORCH, APEX or NAIVE.
        amp_config: The mode's options, as docs/compat.md lists them.

    Returns:
        ``(model, optimizer, criterion)``; the optimizer has ``backward(loss)``, ``clip_grad_norm(model, max_norm)``,
        ``step()`` and the session as ``amp``.

    Raises:
        PlanError: A mode or an option that is not allowed.
        UnknownNameError: An option that the mode does not have.
    """
    recipe = recipe_of(mode, amp_config)
    parameter = next(model.parameters(), None)
    amp = Amp(recipe.plan, device=None if parameter is None else parameter.device)
    return prepare(recipe, amp, model, optimizer, criterion)


def convert_to_torch_amp(
    model: nn.Module, optimizer: Optimizer, criterion: Any = None, amp_config: Any = None
) -> tuple[Any, Any, Any]:
    """``convert_to_amp`` in the torch mode."""
    return convert_to_amp(model, optimizer, criterion, AMP_TYPE.TORCH, amp_config)


def convert_to_apex_amp(model: nn.Module, optimizer: Optimizer, amp_config: Any = None) -> tuple[Any, Any]:
    """``convert_to_amp`` in the Apex mode; returns the model and the optimizer."""
    return convert_to_amp(model, optimizer, None, AMP_TYPE.APEX, amp_config)[:2]


def convert_to_naive_amp(model: nn.Module, optimizer: Optimizer, amp_config: Any = None) -> tuple[Any, Any]:
    """``convert_to_amp`` in the naive mode; returns the model and the optimizer."""
    return convert_to_amp(model, optimizer, None, AMP_TYPE.NAIVE, amp_config)[:2]


def prepare(
    recipe: Recipe,
    amp: Amp,
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Any,
    clip_grad_norm: float = 0.0,
) -> tuple[nn.Module, AmpOptimizer, Any]:
    """Prepare by a session that exists; ``initialize`` makes it earlier, to shard by it."""
    part = gpc.pipeline_parallel_size > 1
    for module in model if isinstance(model, nn.ModuleList) and part else [model]:
        amp.prepare(module, optimizer, part=part)
    _declare_cut(amp, model)
    kind = NaiveAMPOptimizer if recipe.mode == "naive" else AmpOptimizer
    if recipe.covers_loss and criterion is not None:
        criterion = AmpCriterion(criterion, amp)
    return model, kind(optimizer, amp, recipe, clip_grad_norm), criterion


def _declare_cut(amp: Amp, model: nn.Module) -> None:
    """Colossal-AI's tensor parallel layers mark each parameter that they cut by ``is_tensor_parallel``."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    group = gpc.get_group(ParallelMode.TENSOR) if gpc.is_initialized(ParallelMode.TENSOR) else None
    for parameter in model.parameters():
        if getattr(parameter, "is_tensor_parallel", False) and not hasattr(parameter, "device_mesh"):
            amp.mark_sharded(parameter, group)
