"""``colossalai.nn.optimizer``: the wrapper around an optimizer that the engine works with."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["ColossalaiOptimizer"]


class ColossalaiOptimizer(Optimizer):
    """An optimizer around another one; whatever it does not say itself is the other's."""

    def __init__(self, optim: Optimizer) -> None:
        # torch's own constructor would make groups and state of its own, where there must be one of each
        self.optim = optim

    @property
    def optimizer(self) -> Optimizer:
        """The innermost optimizer, torch's own."""
        inner = self.optim
        return inner.optimizer if isinstance(inner, ColossalaiOptimizer) else inner

    # the innermost optimizer's
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
        """Compute gradients of a loss."""
        loss.backward()

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Compute gradients of an output whose own is known, as a pipeline written by hand does."""
        torch.autograd.backward(tensor, grad)

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> None:
        """Clip the gradients of a model to a global norm; 0 leaves them alone."""
        if max_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
