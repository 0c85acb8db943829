"""Steps of optimizers that evaluate the loss themselves, LBFGS above all, under a loss scale."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["NonFiniteEvaluation", "Snapshot"]


class NonFiniteEvaluation(Exception):
    """An evaluation of the closure gave a gradient that is not finite; the step is taken back."""


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple, deque)):
        return type(value)(_copy(item) for item in value)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value


class Snapshot:
    """Parameters and state of an optimizer as they were before a step.

    Costs a copy of both, which only steps with a closure pay.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._values = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._state = {parameter: _copy(state) for parameter, state in optimizer.state.items()}

    def restore(self) -> None:
        """Put everything back, in place."""
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
