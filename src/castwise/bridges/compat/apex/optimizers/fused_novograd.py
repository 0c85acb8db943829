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

    Parameters in fp16 and bf16 are updated in fp32 arithmetic. The optimizer can load states saved by Apex, which stored
    the running gradient norms of a group together. Here the state of each parameter holds the running norm of its gradient.

    Args:
        params: Parameters, of any floating dtypes.
        lr: Learning rate.
        bias_correction: Divide running means and norms by the sum of their weights, as if they had started at zero.
        betas: Decay factors of the running mean of the gradient and of its running norm.
        eps: Added to the norm.
        weight_decay: Default for each group.
        amsgrad: Not supported, as in Apex.
        reg_inside_moment: Divide the gradient by its norm and add weight decay before the running mean is taken, as in
            the paper; False does this to the mean.
        grad_averaging: Weight a gradient by ``1 - betas[0]`` in its running mean; False weights it by 1.
        norm_type: 2 for the 2-norm of a gradient, or 0 for its largest absolute value.
        init_zero: Start the running norms at zero; False starts them at the first gradient's norm.
        set_grad_none: Make ``zero_grad`` set gradients to None; False sets them to zeros.

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
        """Update the parameters that have gradients, and return the closure's result; None without a closure."""
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
