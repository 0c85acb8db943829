"""The optimizer wrappers of the AMP modes. They have Colossal-AI's methods, and a castwise session does the work."""

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
"""The key of the castwise session's state in an optimizer's state dict. torch's optimizers ignore this key."""


class AmpOptimizer(ColossalaiOptimizer):
    """Wraps an optimizer, scales losses, and skips a step if a gradient is infinite or NaN.

    Each step clips the gradients to the global norm ``clip_grad_norm``. If that is 0, the norm in the options of the
    AMP mode is used. If both are 0, gradients are not clipped.

    Attributes:
        amp: The :class:`castwise.Amp` that does the work, for features that Colossal-AI does not have.
    """

    def __init__(self, optim: Optimizer, amp: Amp, recipe: Recipe, clip_grad_norm: float = 0.0) -> None:
        super().__init__(optim)
        self.amp = amp
        self.recipe = recipe
        self.max_norm = clip_grad_norm or recipe.clip_grad_norm

    @property
    def loss_scale(self) -> float:
        """The loss scale, as a number. Reading it synchronises with the device."""
        return self.amp.get_scale()

    def backward(self, loss: Tensor) -> None:
        """Scale a loss and add its scaled gradients to ``.grad``."""
        self.amp.backward(loss)

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Run the backward pass from a tensor whose gradient is known, as the stages of a pipeline do.

        Args:
            tensor: An output of the model or of a stage.
            grad: The gradient of the loss with respect to ``tensor``, multiplied by the loss scale already.
        """
        self.amp.scale(
            torch.zeros((), device=tensor.device)
        )  # tells the session that gradients of a new step begin
        torch.autograd.backward(tensor, grad)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> None:
        """Unscale the gradients and clip them to a global norm, which is computed over all ranks.

        This method does nothing if ``max_norm`` is 0, or if each step clips to the same norm anyway.
        """
        if max_norm > 0 and max_norm != self.max_norm:
            self.amp.clip_grad_norm_(self.optim, max_norm)

    def step(self, closure: Any = None) -> Any:
        """Unscale and clip the gradients, then make an optimizer step, or skip it.

        All ranks skip the step if a gradient is infinite or NaN on any rank.
        """
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
        """Return the optimizer's state, with the loss scale under a key of its own."""
        return {**self.optim.state_dict(), _SAVED: self.amp.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class, or the optimizer without this wrapper, has saved."""
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != _SAVED})
        if _SAVED in state_dict:
            self.amp.load_state_dict(state_dict[_SAVED])


class ApexAMPOptimizer(AmpOptimizer):
    """The optimizer wrapper of the Apex mode, whose backward passes leave unscaled gradients.

    Apex's ``scale_loss`` does the same. So code that clips or reads ``parameter.grad`` before the step gets gradients
    that are not multiplied by the loss scale. The step checks again whether the gradients are finite.
    """

    def backward(self, loss: Tensor) -> None:
        """Add the unscaled gradients of a loss to ``.grad``.

        If gradients can differ between ranks, the ranks must call this together.
        """
        super().backward(loss)
        self._unscale()

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Run backward from a tensor, given the gradient of the loss with respect to that tensor, without the loss scale."""
        scale = self.amp.scale(torch.ones((), device=tensor.device))
        torch.autograd.backward(tensor, grad * scale)
        self._unscale()

    def _unscale(self) -> None:
        if self.amp.plan.loss_scale is not None:
            self.amp.unscale_(self.optim)


class NaiveAMPOptimizer(AmpOptimizer):
    """The optimizer wrapper of the naive mode, whose ``step`` also returns whether the step was made.

    Each step clips the gradients first. ``step()`` returns ``(True, grad_norm)`` if the step was made, and ``(False,
    None)`` if it was skipped. ``grad_norm`` is a number, or None if gradients are not clipped. With
    ``log_num_zeros_in_grad=True``, there is a third value: the number of zero elements in the gradients, or None if the
    step was skipped.
    """

    def _outcome(self, result: Any) -> Any:
        super()._outcome(result)
        if result.skipped:
            self.zero_grad()
            return (False, None, None) if self.recipe.counts_zeros else (False, None)
        norm = None if result.grad_norm is None else float(result.grad_norm)
        return (True, norm, self._zeros()) if self.recipe.counts_zeros else (True, norm)

    def _zeros(self) -> int:
        """Return the number of zero elements in the gradients that this process holds."""
        grads = [local_grad(p) for group in self.param_groups for p in group["params"]]
        return sum(int((grad == 0).sum()) for grad in grads if grad is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state under the keys of Colossal-AI's ``FP16Optimizer``.

        The keys are ``optimizer``, ``grad_scaler`` and ``fp32_master_param_groups``.
        """
        return {
            "optimizer": self.optim.state_dict(),
            "grad_scaler": self.amp.state_dict()["scaler"] or {},
            "fp32_master_param_groups": [
                [p.detach().clone() for p in group["params"]] for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class, Colossal-AI, or the optimizer without this wrapper has saved."""
        if "optimizer" not in state_dict:
            self.optim.load_state_dict(state_dict)
            return
        self.optim.load_state_dict(state_dict["optimizer"])
        if state_dict.get("grad_scaler"):
            # Colossal-AI saves the scale as a tensor, and no counters
            saved, session = state_dict["grad_scaler"], self.amp.state_dict()
            own = {key: saved.get(key, value) for key, value in (session["scaler"] or {}).items()}
            self.amp.load_state_dict({**session, "scaler": {**own, "scale": float(saved["scale"])}})
        for group, saved_group in zip(
            self.param_groups, state_dict.get("fp32_master_param_groups", ()), strict=False
        ):
            for parameter, values in zip(group["params"], saved_group, strict=True):
                parameter.data.copy_(values)
        copy_to_model(self.optim)
