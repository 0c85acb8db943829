"""The optimizers of the modes: a castwise session behind Colossal-AI's calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise import Amp
from castwise.bridges.compat.colossalai.engine.gradient_handler import local_grad
from castwise.bridges.compat.colossalai.logging import get_dist_logger
from castwise.bridges.compat.colossalai.nn.optimizer import ColossalaiOptimizer
from castwise.bridges.compat.colossalai.plans import Recipe
from castwise.core.masters import copy_to_model
from castwise.errors import StateError

__all__ = ["AmpOptimizer", "ApexAMPOptimizer", "NaiveAMPOptimizer"]

_SAVED = "castwise_amp"
"""Key of the session's state in an optimizer's state dict; torch's optimizers ignore it."""


class AmpOptimizer(ColossalaiOptimizer):
    """An optimizer whose losses are scaled and whose steps are skipped if a gradient is not finite.

    Each step clips to the global norm ``clip_grad_norm``, or to that of the recipe; 0 for none.

    Attributes:
        amp: The castwise session, for features beyond Colossal-AI.
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
        """Compute gradients of an output whose own gradient, already scaled, is given."""
        self.amp.scale(torch.zeros((), device=tensor.device))  # the window of the last step is over
        torch.autograd.backward(tensor, grad)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> None:
        """Unscale the gradients and clip them to a global norm, over all ranks.

        Does nothing if each step clips to that norm anyway, or if it is 0.
        """
        if max_norm > 0 and max_norm != self.max_norm:
            self.amp.clip_grad_norm_(self.optim, max_norm)

    def step(self, closure: Any = None) -> Any:
        """Unscale, agree with the other ranks, clip, and step or skip."""
        if closure is not None:
            raise StateError(
                f"{type(self).__name__}.step(closure): closures are not supported, as in Colossal-AI; use "
                f"engine.optimizer.amp.step(optimizer, closure=...) of castwise"
            )
        return self._outcome(self.amp.step(self.optim, max_norm=self.max_norm or None))

    def _outcome(self, result: Any) -> Any:
        if self.recipe.verbose and result.skipped:
            get_dist_logger().info(
                f"gradient overflow: step skipped, loss scale {self.amp.get_scale():g}", ranks=[0]
            )

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the loss scale under a separate key."""
        return {**self.optim.state_dict(), _SAVED: self.amp.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of the unwrapped optimizer."""
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != _SAVED})
        if _SAVED in state_dict:
            self.amp.load_state_dict(state_dict[_SAVED])


class ApexAMPOptimizer(AmpOptimizer):
    """The optimizer of the Apex mode: each backward pass leaves unscaled gradients, as Apex's ``scale_loss`` does.

    So code that clips or reads ``parameter.grad`` before the step sees it without the loss scale.
    The step checks again whether gradients are finite.
    """

    def backward(self, loss: Tensor) -> None:
        """Add gradients of a loss; ranks whose gradients can differ make the call together."""
        super().backward(loss)
        self._unscale()

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Add gradients of an output whose own gradient, without the loss scale, is given."""
        scale = self.amp.scale(torch.ones((), device=tensor.device))
        torch.autograd.backward(tensor, grad * scale)
        self._unscale()

    def _unscale(self) -> None:
        if self.amp.plan.loss_scale is not None:
            self.amp.unscale_(self.optim)


class NaiveAMPOptimizer(AmpOptimizer):
    """The optimizer of the naive mode: its ``step`` clips, and returns whether the update was made.

    ``step()`` returns ``(True, grad_norm)``, the norm a number or None without clipping, or ``(False, None)``; with
    ``log_num_zeros_in_grad=True`` also a third value, the number of zero elements of the gradients.
    """

    def _outcome(self, result: Any) -> Any:
        super()._outcome(result)
        if result.skipped:
            self.zero_grad()
            return (False, None, None) if self.recipe.counts_zeros else (False, None)
        norm = None if result.grad_norm is None else float(result.grad_norm)
        return (True, norm, self._zeros()) if self.recipe.counts_zeros else (True, norm)

    def _zeros(self) -> int:
        """The number of zeros in this process's gradients; each of several processes counts its local ones."""
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
        """Load a state of this class, of Colossal-AI, or of the unwrapped optimizer."""
        if "optimizer" not in state_dict:
            self.optim.load_state_dict(state_dict)
            return
        self.optim.load_state_dict(state_dict["optimizer"])
        if state_dict.get("grad_scaler"):
            # Colossal-AI's has a tensor for the scale, and no counters
            saved, session = state_dict["grad_scaler"], self.amp.state_dict()
            own = {key: saved.get(key, value) for key, value in (session["scaler"] or {}).items()}
            self.amp.load_state_dict({**session, "scaler": {**own, "scale": float(saved["scale"])}})
        for group, saved_group in zip(
            self.param_groups, state_dict.get("fp32_master_param_groups", ()), strict=False
        ):
            for parameter, values in zip(group["params"], saved_group, strict=True):
                parameter.data.copy_(values)
        copy_to_model(self.optim)
