"""``colossalai.nn.optimizer``: the engine's optimizer wrapper, and torch's Adam and SGD under Colossal-AI's names."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.bridges.compat.coverage import missing_attribute
from castwise.errors import PlanError

__all__ = ["ColossalaiOptimizer", "FusedAdam", "FusedSGD", "HybridAdam"]
__getattr__ = missing_attribute("colossalai.nn.optimizer")


class ColossalaiOptimizer(Optimizer):
    """Wraps an optimizer. Attributes that the wrapper does not define are those of the wrapped optimizer."""

    def __init__(self, optim: Optimizer) -> None:
        # torch's constructor is not called: it would create groups and state beside those of the wrapped optimizer
        self.optim = optim

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer inside this wrapper, or inside the wrappers that it wraps."""
        inner = self.optim
        return inner.optimizer if isinstance(inner, ColossalaiOptimizer) else inner

    # these belong to the wrapped optimizer
    param_groups = property(attrgetter("optim.param_groups"))
    state = property(attrgetter("optim.state"))
    defaults = property(attrgetter("optim.defaults"))

    def __getattr__(self, name: str) -> Any:
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.optim.step() if closure is None else self.optim.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss."""
        loss.backward()

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Run backward from a tensor, given the gradient of the loss with respect to that tensor.

        A hand-written pipeline does this in each stage except the last.
        """
        torch.autograd.backward(tensor, grad)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> None:
        """Clip the gradients of a model to a global norm. A norm of 0 leaves the gradients unchanged."""
        if max_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)


class HybridAdam(torch.optim.Adam):
    """Works as torch's fused ``AdamW``, or as its fused ``Adam`` with ``adamw_mode=False``, with Colossal-AI's arguments.

    ``simd_log`` is accepted and ignored.

    Raises:
        PlanError: ``bias_correction`` is False, or ``nvme_offload_fraction`` is not 0.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        simd_log: bool = False,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        if nvme_offload_fraction:
            raise PlanError(
                f"HybridAdam(nvme_offload_fraction={nvme_offload_fraction!r}): allowed: 0.0. The state stays on its "
                "device; shard it with zero = dict(level=3) in the configuration"
            )
        _check_correction("HybridAdam", bias_correction)
        super().__init__(
            model_params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adamw_mode
        )


class FusedAdam(torch.optim.Adam):
    """Works as torch's fused ``AdamW``, or as its fused ``Adam`` with ``adamw_mode=False``.

    The arguments are those of Colossal-AI's ``FusedAdam``. ``set_grad_none`` is accepted and ignored, as in Colossal-AI:
    ``zero_grad`` has an argument for this.

    Raises:
        PlanError: ``bias_correction`` is False, or ``amsgrad`` is True. Colossal-AI refuses ``amsgrad`` too.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise PlanError("FusedAdam(amsgrad=True): allowed: False. Use torch.optim.AdamW(amsgrad=True)")
        _check_correction("FusedAdam", bias_correction)
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adamw_mode)


class FusedSGD(torch.optim.SGD):
    """``torch.optim.SGD`` with Colossal-AI's arguments.

    Raises:
        PlanError: ``wd_after_momentum`` is True.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise PlanError(
                "FusedSGD(wd_after_momentum=True): allowed: False. Leave it out, or decay the weights by hand"
            )
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


def _check_correction(name: str, bias_correction: bool) -> None:
    if not bias_correction:
        raise PlanError(
            f"{name}(bias_correction=False): allowed: True. Leave it out, and use learning-rate warmup, as "
            "colossalai.nn.lr_scheduler.LinearWarmupLR does"
        )
