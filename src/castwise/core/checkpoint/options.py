"""Which saved options and state an optimizer accepts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from castwise.core.checkpoint.storage import Entry

HOW_NOT_WHAT = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that select a kernel: the current ones are kept."""
OF_A_SCHEDULE = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Options that torch's schedulers add; all are numbers."""
OF_A_WEIGHT = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum",
    "ax", "prev", "step_size",
})  # fmt: skip
"""State that has the shape of its parameter in each of torch's optimizers."""


def alike(own: Any, saved: Any) -> bool:
    """Whether a saved option can replace an optimizer's current one; None may mean that it is absent."""
    if own is None or saved is None:
        return True
    if isinstance(saved, int) and abs(saved) >= 2**1000:  # an integer too large for a float
        return False
    if isinstance(own, bool) or isinstance(saved, bool):
        return isinstance(own, bool) and isinstance(saved, bool)
    if isinstance(own, (int, float, Tensor)):
        return isinstance(saved, (int, float)) or (isinstance(saved, Entry) and saved.shape in ((), (1,)))
    if isinstance(own, (list, tuple)):
        same = isinstance(saved, (list, tuple)) and len(saved) == len(own)
        return same and all(map(alike, own, saved))
    return isinstance(saved, type(own))


def of_torch(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of torch's, whose options and state are known."""
    return type(optimizer).__module__.startswith("torch.optim.")


def takes(optimizer: Optimizer, group: Mapping[str, Any], key: str) -> bool:
    """Whether an optimizer has an option; optimizers from other libraries may add some as they step."""
    known = key in group or key in optimizer.defaults or key in OF_A_SCHEDULE
    return known or not of_torch(optimizer)


def _made(optimizer: Optimizer, options: Mapping[str, Any], parameter: Tensor) -> Optimizer:
    """Create an optimizer of the same torch class with some options.

    Raises:
        TypeError, ValueError: It does not accept them.
    """
    known = inspect.signature(type(optimizer)).parameters
    given = {
        key: value
        for key, value in options.items()
        if key in known and key not in HOW_NOT_WHAT and not isinstance(value, Entry)
    }
    return type(optimizer)([parameter], **given)


def refusal(optimizer: Optimizer, options: Mapping[str, Any]) -> str | None:
    """The error that creating a torch optimizer with some options raises."""
    try:
        _made(optimizer, options, torch.zeros(1, 1, device="cpu"))
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def state_keys(optimizer: Optimizer, options: Mapping[str, Any], dims: int) -> set[str]:
    """The state keys of a torch optimizer after a step with some options; empty if no step can be tried."""
    parameter = torch.zeros((1,) * dims, device="cpu")
    parameter.grad = torch.zeros_like(parameter)
    try:
        made = _made(optimizer, options, parameter)
        step = inspect.unwrap(type(made).step)  # without the hooks that run at every optimizer's step
        with torch.no_grad():
            step(made)
    except (KeyError, RuntimeError, TypeError, ValueError):
        return set()  # LBFGS needs a closure, SparseAdam a sparse gradient
    return {str(key) for key, value in made.state[parameter].items() if value is not None}


def fits(own: Any, saved: Any) -> bool:
    """Whether a saved value can replace one in an optimizer's state."""
    if isinstance(own, Tensor) and own.dim() > 0:
        return isinstance(saved, Entry) and saved.shape == own.shape
    return not isinstance(own, (int, float, Tensor)) or (saved is not None and alike(own, saved))


def as_kind(value: Any, own: Any) -> Any:
    """A learning rate as a tensor or a number, whichever the optimizer has."""
    if isinstance(own, Tensor) and isinstance(value, (int, float)):
        return torch.full_like(own, value)
    if isinstance(own, float) and isinstance(value, Tensor):
        return value.item()
    return value
