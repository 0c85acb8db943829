"""``apex.optimizers.FusedLAMB``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from castwise.bridges.compat.apex.optimizers.base import ClearsAsSaid, evaluate, with_gradients
from castwise.core.masters.updates import lamb_, total_norm

__all__ = ["FusedLAMB"]


class FusedLAMB(ClearsAsSaid):
    """The LAMB optimizer, on any device.

    Parameters in fp16 and bf16 are updated in fp32 arithmetic. The optimizer can load states that Apex has saved.

    Args:
        params: The parameters, of any floating dtypes.
        lr: The learning rate.
        bias_correction: Whether the running means are divided by ``1 - beta**step``, as in Adam.
        betas: The decay factors of the running means of the gradient and of its square.
        eps: A small number that is added to the root of the mean square.
        weight_decay: The weight decay of each group that does not give its own.
        amsgrad: Not supported, as in Apex.
        adam_w_mode: Whether weight decay is added to the update, as in AdamW. With False, it is added to the gradient.
        grad_averaging: Whether a gradient has the weight ``1 - betas[0]`` in its running mean. With False, its weight
            is 1.
        set_grad_none: Whether ``zero_grad`` sets gradients to None. With False, it sets them to zeros.
        max_grad_norm: The global norm to which all gradients are clipped at each step. The tensors ``.grad`` are not
            changed.
        use_nvlamb: Whether updates are scaled to the norm of their parameter also in groups without weight decay.

    Raises:
        RuntimeError: ``amsgrad`` is True.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
    """

    said = ("set_grad_none", "adam_w_mode", "use_nvlamb")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support the AMSGrad variant.")
        self.set_grad_none, self.adam_w_mode, self.use_nvlamb = set_grad_none, adam_w_mode, use_nvlamb
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "grad_averaging": grad_averaging,
                "max_grad_norm": max_grad_norm,
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
        work = [(group, with_gradients(group["params"], "FusedLAMB")) for group in self.param_groups]
        every = [grad for _, lists in work for _, grads in lists for grad in grads]
        norm = total_norm(every) if every else torch.zeros((), device="cpu")
        most = self.defaults["max_grad_norm"]  # Apex uses one value for all groups
        divisor = torch.where(norm > most, norm / most, 1.0)
        for group, lists in work:
            group["step"] = group.get("step", 0) + 1
            for params, grads in lists:
                states = [self.state[parameter] for parameter in params]
                for parameter, state in zip(params, states, strict=True):
                    if not state:
                        state["exp_avg"] = torch.zeros_like(parameter)
                        state["exp_avg_sq"] = torch.zeros_like(parameter)
                lamb_(
                    params,
                    grads,
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=group["step"],
                    divisor=divisor,
                    bias_correction=group["bias_correction"],
                    grad_averaging=group["grad_averaging"],
                    decoupled=self.adam_w_mode,
                    adapt_all=self.use_nvlamb,
                )
        return loss
