"""``apex.optimizers.FusedNovoGrad``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from castwise.bridges.compat.apex.optimizers.base import ClearsAsSaid, evaluate, with_gradients
from castwise.core.masters.updates import novograd_

__all__ = ["FusedNovoGrad"]


class FusedNovoGrad(ClearsAsSaid):
    """The NovoGrad optimizer, on any device.

    Parameters in fp16 and bf16 are updated in fp32 arithmetic. The state of each parameter holds the running norm of
    its gradient. The optimizer can load states that Apex has saved, in which the running norms of a group are stored
    together.

    Args:
        params: The parameters, of any floating dtypes.
        lr: The learning rate.
        bias_correction: Whether running means and norms are divided by the sum of their weights, as if they had started
            at zero.
        betas: The decay factors of the running mean of the gradient and of its running norm.
        eps: A small number that is added to the norm.
        weight_decay: The weight decay of each group that does not give its own.
        amsgrad: Not supported, as in Apex.
        reg_inside_moment: Whether the gradient is divided by its norm and weight decay is added before the running mean
            is computed, as in the paper. With False, this is done to the running mean.
        grad_averaging: Whether a gradient has the weight ``1 - betas[0]`` in its running mean. With False, its weight
            is 1.
        norm_type: 2 for the 2-norm of a gradient, or 0 for its largest absolute value.
        init_zero: Whether the running norms start at zero. With False, they start at the norm of the first gradient.
        set_grad_none: Whether ``zero_grad`` sets gradients to None. With False, it sets them to zeros.

    Raises:
        RuntimeError: ``amsgrad`` is True, or ``norm_type`` is neither 0 nor 2.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep
    Networks", 2019.
    """

    said = ("set_grad_none", "moment_mode")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad does not support the AMSGrad variant.")
        if norm_type not in (0, 2):
            raise RuntimeError(
                f"FusedNovoGrad only support l2/inf norm now: norm_type was {norm_type}; allowed: 2, or 0 for inf."
            )
        self.set_grad_none, self.moment_mode = set_grad_none, 0 if reg_inside_moment else 1
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "grad_averaging": grad_averaging,
                "norm_type": norm_type,
                "init_zero": init_zero,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: A function that computes the loss and its gradients, if given.

        Returns:
            The return value of the closure, or None without a closure.
        """
        loss = evaluate(closure)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            order = 2.0 if group["norm_type"] == 2 else math.inf
            for params, grads in with_gradients(group["params"], "FusedNovoGrad"):
                states = [self.state[parameter] for parameter in params]
                for parameter, grad, state in zip(params, grads, states, strict=True):
                    if not state:
                        wide = torch.promote_types(grad.dtype, torch.float32)
                        norm = torch.linalg.vector_norm(grad.to(wide), order)
                        state["exp_avg"] = torch.zeros_like(parameter)
                        state["exp_avg_sq"] = torch.zeros_like(norm) if group["init_zero"] else norm
                novograd_(
                    params,
                    grads,
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=group["step"],
                    order=order,
                    bias_correction=group["bias_correction"],
                    grad_averaging=group["grad_averaging"],
                    inside=self.moment_mode == 0,
                )
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of this class or of Apex's FusedNovoGrad.

        Apex stores two lists of running norms in each group: one for the fp16 parameters, then one for the fp32 parameters.
        """
        state = {index: dict(entry) for index, entry in state_dict["state"].items()}
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group in groups:
            norms = [iter(each) for each in group.pop("exp_avg_sq", ())]
            for index in group["params"] if norms else ():
                if index in state:
                    state[index]["exp_avg_sq"] = next(norms[state[index]["exp_avg"].dtype is torch.float32])
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
        # torch has cast each norm to its parameter's dtype, in which fp16 may overflow
        indices = [index for group in groups for index in group["params"]]
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, params, strict=True):
            if index in state:
                self.state[parameter]["exp_avg_sq"] = (
                    state[index]["exp_avg_sq"].detach().to(parameter.device, copy=True)
                )
