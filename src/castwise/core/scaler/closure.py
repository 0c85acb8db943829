"""Steps of optimizers that evaluate the loss themselves, LBFGS above all, under a loss scale."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class _NonFiniteEvaluation(Exception):
    """An evaluation of the closure gave a gradient that is not finite; the step is taken back."""


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, deque):
        return deque(map(_copy, value), value.maxlen)
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value


class Snapshot:
    """Parameters, state and options of an optimizer as they were before a step.

    Costs a copy of all of them, which only steps with a closure pay.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._values = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._state = {parameter: _copy(state) for parameter, state in optimizer.state.items()}
        self._options = [
            {key: (value, _copy(value)) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        """Put everything back; parameters, and options that are tensors, in place."""
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.copy_(value)
            for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
                for key in group.keys() - options.keys() - {"params"}:
                    del group[key]
                for key, (given, before) in options.items():
                    group[key] = given.copy_(before) if isinstance(given, torch.Tensor) else before
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def step_or_restore(
    optimizer: Optimizer,
    closure: Callable[[], Any],
    look: Callable[[], Iterable[torch.Tensor]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, bool]:
    """Let an optimizer step by a closure, and take the step back at the first evaluation with a gradient that is not finite.

    ``look`` is called after each evaluation; it unscales the gradients and returns their non-finite flags.

    Returns:
        What ``optimizer.step(closure, *args, **kwargs)`` returned, None if it was taken back; and whether it was.
    """
    snapshot = Snapshot(optimizer)

    def evaluate() -> Any:
        with torch.enable_grad():
            loss = closure()
        if any(flag.item() for flag in look()):
            raise _NonFiniteEvaluation
        return loss

    try:
        return optimizer.step(evaluate, *args, **kwargs), False
    except _NonFiniteEvaluation:
        snapshot.restore()
        return None, True
