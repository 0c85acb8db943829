"""``apex.parallel.LARC``: a module of this name, as scripts import it."""  # noqa: N999

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LARC"]


class LARC:
    """Layer-wise adaptive rates around any torch optimizer.

    Each gradient is multiplied by ``trust * |w| / (|g| + decay * |w| + eps)``, divided by the group's rate and cut at 1
    where ``clip`` is set.

    Args:
        optimizer: To wrap; its weight decay is applied here.
        trust_coefficient: ``trust``, how much of a weight's norm a step may be.
        clip: Whether the optimizer's own rate is the largest.
        eps: Keeps the division from zero.

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
        # _amp_stash and the like are this object's own, or nobody's.
        if name.startswith("_") or name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @torch.no_grad()
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Adapt the gradients, in place, then step."""
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
        # Where either norm is zero, the gradient and its decay stay out of it, as in Apex.
        alive = (weight_norm != 0) & (grad_norm != 0)
        grad.copy_(torch.where(alive, (grad + decay * weights) * factor, grad))


# apex.parallel.LARC is this class here and this module in Apex, so scripts write apex.parallel.LARC.LARC too
LARC.LARC = LARC  # type: ignore[attr-defined]
