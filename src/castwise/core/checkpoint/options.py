"""Find out which saved options and which saved state an optimizer accepts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from castwise.core.checkpoint.storage import Entry

HOW_NOT_WHAT = ("foreach", "fused", "capturable", "differentiable")
"""The options of an optimizer that select a kernel. A load keeps their current values."""
OF_A_SCHEDULE = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""The options that torch's learning-rate schedulers add to parameter groups. All are numbers."""
OF_A_WEIGHT = frozenset({
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum",
    "ax", "prev", "step_size",
})  # fmt: skip
"""The keys of optimizer state that has the shape of its parameter, in each of torch's optimizers with such a key."""


def alike(own: Any, saved: Any) -> bool:
    """Whether a saved option of an optimizer can replace the current one, by type. True if either is None."""
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
    """Whether an optimizer's class is one of torch's, so that its options and state are known."""
    return type(optimizer).__module__.startswith("torch.optim.")


def takes(optimizer: Optimizer, group: Mapping[str, Any], key: str) -> bool:
    """Whether an optimizer accepts an option in a parameter group.

    An optimizer from another library accepts every option, since it may add options when it steps.
    """
    known = key in group or key in optimizer.defaults or key in OF_A_SCHEDULE
    return known or not of_torch(optimizer)


def _made(optimizer: Optimizer, options: Mapping[str, Any], parameter: Tensor) -> Optimizer:
    """Create an optimizer of the same torch class with the given options.

    Raises:
        TypeError, ValueError: The class does not accept the options.
    """
    known = inspect.signature(type(optimizer)).parameters
    given = {
        key: value
        for key, value in options.items()
        if key in known and key not in HOW_NOT_WHAT and not _holds_tensor(value)
    }
    return type(optimizer)([parameter], **given)


def _holds_tensor(option: Any) -> bool:
    return isinstance(option, Entry) or (
        isinstance(option, (list, tuple)) and any(map(_holds_tensor, option))
    )


def refusal(optimizer: Optimizer, options: Mapping[str, Any]) -> str | None:
    """Return the message of the error if a torch optimizer cannot be created with some options, or None if it can."""
    try:
        _made(optimizer, options, torch.zeros(1, 1, device="cpu"))
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def state_keys(optimizer: Optimizer, options: Mapping[str, Any], dims: int) -> set[str]:
    """Return the keys of the state that a torch optimizer with some options has for a parameter after a step.

    The set is empty if a step cannot be tried.
    """
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
    """Whether the saved value ``saved`` can replace the value ``own`` in an optimizer's state, by shape and type."""
    if isinstance(own, Tensor) and own.dim() > 0:
        return isinstance(saved, Entry) and saved.shape == own.shape
    return not isinstance(own, (int, float, Tensor)) or (saved is not None and alike(own, saved))


def as_kind(value: Any, own: Any) -> Any:
    """Convert an option, such as a learning rate, to a tensor or a number, whichever the optimizer has now.

    A tensor has the device of the optimizer's present one.
    """
    if isinstance(own, Tensor) and isinstance(value, (int, float, Tensor)):
        return value.to(own.device) if isinstance(value, Tensor) else torch.full_like(own, value)
    if isinstance(own, (list, tuple)) and isinstance(value, (list, tuple)):  # betas can be tensors
        return type(value)(map(as_kind, value, own))
    if isinstance(own, float) and isinstance(value, Tensor):
        return value.item()
    return value
