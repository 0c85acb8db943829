"""The optimizer wrapper LARC, in a module of the same name, as in Apex."""  # noqa: N999

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LARC"]


class LARC:
    """Wraps a torch optimizer and scales the gradient of each parameter by a layer-wise adaptive rate.

    The sum of gradient ``g`` and weight decay is multiplied by ``trust * |w| / (|g| + decay * |w| + eps)``, where ``w``
    is the parameter. With ``clip``, this factor is divided by the learning rate of the group and limited to 1.

    Args:
        optimizer: The optimizer to wrap. Its weight decay is added to the gradients by this class and not by the
            optimizer.
        trust_coefficient: The factor ``trust``, which limits the size of a step relative to the norm of the weight.
        clip: Whether the learning rate of the optimizer is an upper limit of the adaptive rate.
        eps: A small number that prevents division by zero.

    Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        # private attributes, such as _amp_stash, are not looked up in the wrapped optimizer
        if name.startswith("_") or name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Scale the gradients in place, then step the wrapped optimizer."""
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        try:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = 0
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._adapt(parameter, group["lr"], decay)
            return self.optim.step(*args, **kwargs)
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay

    def _adapt(self, parameter: torch.Tensor, rate: float, decay: float) -> None:
        weights, grad = parameter.detach(), parameter.grad
        assert grad is not None
        weight_norm, grad_norm = torch.linalg.vector_norm(weights), torch.linalg.vector_norm(grad)
        factor = self.trust_coefficient * weight_norm / (grad_norm + weight_norm * decay + self.eps)
        if self.clip:
            factor = (factor / rate).clamp(max=1)
        # If either norm is zero, the gradient is not scaled and gets no weight decay, as in Apex.
        alive = (weight_norm != 0) & (grad_norm != 0)
        grad.copy_(torch.where(alive, (grad + decay * weights) * factor, grad))


# In Apex apex.parallel.LARC is the module, so some scripts write apex.parallel.LARC.LARC; here it is the class.
LARC.LARC = LARC  # type: ignore[attr-defined]
