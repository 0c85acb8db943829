"""Move optimizer state to other parameters, and convert it to their dtypes and strides."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.masters.originals import is_low


def move_state(optimizer: Optimizer, targets: Mapping[Tensor, nn.Parameter], *, fit: bool = True) -> None:
    """Move optimizer state from parameters to other parameters, and convert it to the form that these would have.

    State with the shape of the other parameter takes its dtype, device and strides. bf16 and fp16 state of any other
    shape (Adafactor's rows and columns, LBFGS's flat history) takes its dtype. ``step`` stays unchanged. After an
    interrupt, each state belongs to one of the two parameters, and repeating the call completes the move.

    Args:
        optimizer: The optimizer whose state is written to.
        targets: Maps parameters to the parameters that get their state. Both are the same if a parameter was converted in
            place. Parameters without state are ignored.
        fit: False moves the state without converting it.
    """
    if not targets:
        return
    moved = {}
    for key in list(optimizer.state):
        state, target = optimizer.state[key], targets.get(key)
        if target is not None and fit:
            state = optimizer.state[key] = {name: _fit_entry(name, v, target) for name, v in state.items()}
        moved[key if target is None else target] = state
    # A master and its parameter are the same key to a dictionary, so the old key must be removed before the new one is added.
    # Both are done in one call of C code, during which no interrupt is handled. That code does not call ``Tensor.__hash__``,
    # which is Python.
    steps: tuple[Callable[[], None], ...] = (
        optimizer.state.clear,
        functools.partial(optimizer.state.update, moved),
    )
    deque(map(operator.call, steps), maxlen=0)


def restride_state(optimizer: Optimizer) -> None:
    """Give the optimizer state of every parameter the parameter's strides and device.

    Fused optimizers on a CPU iterate over parameter, gradient and state in the order of their memory. So they silently
    update wrong elements if the strides differ. Strides differ after the memory format of a model was changed following
    its first step, and after a state dict of another memory format was loaded.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state:
                continue
            for key, value in state.items():
                if key == "step" or not isinstance(value, Tensor) or value.shape != parameter.shape:
                    continue
                if not _torch.tensors.is_dense(
                    value
                ):  # a sparse tensor has no strides; SGD's momentum, a copy of the gradient, may be sparse
                    continue
                if value.stride() != parameter.stride() or value.device != parameter.device:
                    state[key] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(
                        value
                    )


def _fit_entry(key: str, value: Any, target: Tensor) -> Any:
    return value if key == "step" else _fit(value, target)


def _fit(value: Any, target: Tensor) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_fit(item, target) for item in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if value.shape == target.shape and (is_low(value) or value.dtype is torch.float32):
        if not _torch.tensors.is_dense(value):
            return value.to(target)
        if (value.dtype, value.stride(), value.device) == (target.dtype, target.stride(), target.device):
            return value
        return torch.empty_like(target, requires_grad=False).copy_(value)
    # a number such as NAdam's product of momenta stays fp32 beside parameters of any format, as in torch
    if is_low(value) or (is_low(target) and value.dtype is torch.float32 and value.dim() > 0):
        return value.to(target.dtype)
    return value
