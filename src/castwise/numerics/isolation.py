"""Experiments that leave no trace: random numbers, process-wide settings and gradient mode as they were before."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from castwise.errors import WorkloadError
from castwise.process import put_settings, settings


def copied(model: torch.nn.Module, call: str) -> torch.nn.Module:
    """A copy of a model to experiment on.

    Raises:
        WorkloadError: The model cannot be copied; it names the caller.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise WorkloadError(
            f"{call}: the model cannot be copied ({type(error).__name__}: {error}), and experiments need copies; detach "
            "tensors that are no parameters or buffers, or give a Workload whose model() builds it"
        ) from error


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (0 to 2**32 - 1), so that a loss draws the same again."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _accelerators() -> list[Any]:
    return [
        module
        for name in ("cuda", "xpu")
        if (module := getattr(torch, name, None)) is not None and module.is_available()
    ]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Give everything back that an experiment may move: generators, gradient mode, and all of :func:`castwise.process.settings`."""
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        for module in _accelerators():
            stack.callback(module.set_rng_state_all, module.get_rng_state_all())
        if torch.backends.mps.is_available():
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        stack.callback(put_settings, settings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda", "xpu", "mps"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def unspoilt(model: torch.nn.Module) -> Iterator[None]:
    """Give a model its gradients and buffers back, should a loss call it in the place of the copy it is given."""
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, gradient, values in gradients:
                parameter.grad = gradient
                if gradient is not None and values is not None and not _equal(gradient, values):
                    gradient.copy_(values)
            for buffer, values in buffers:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two gradients are equal; torch compares dense ones alone."""
    if one.is_sparse and other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(one, other)
