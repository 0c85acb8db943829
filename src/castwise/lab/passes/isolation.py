"""Run experiments without side effects: restore random numbers, process-wide settings, gradient mode and the model."""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from castwise.core import _torch, devices
from castwise.core.casting import frames
from castwise.core.model.copying import copy_of
from castwise.core.parallel.whole import is_cut, whole_copy
from castwise.core.ranks.pieces import is_dtensor
from castwise.core.session.process import put_settings, settings
from castwise.errors import CastwiseError, WorkloadError


def copied(model: torch.nn.Module, call: str) -> torch.nn.Module:
    """Return a copy of a model for experiments; a sharded model is copied whole, see :func:`castwise.parallel.whole.whole_copy`.

    Raises:
        WorkloadError: The model cannot be copied, or has uninitialised lazy parameters; the message names the caller.
    """
    _refuse_lazy(model, call)
    _refuse_pieces(model, call)
    try:
        return whole_copy(model, call) if is_cut(model) else copy_of(model)
    except CastwiseError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{call}: the model cannot be copied ({type(error).__name__}: {error}), and experiments need copies; detach "
            "tensors that are not parameters or buffers, or give a Workload whose model() builds it"
        ) from error


def _refuse_pieces(model: torch.nn.Module, call: str) -> None:
    pieces = [
        name for name, parameter in model.named_parameters() if _torch.distributed.was_dtensor(parameter)
    ]
    if pieces:
        raise WorkloadError(
            f"{call}: {pieces[0]} is a piece of a DTensor that DistributedDataParallel(device_mesh=...) holds, which cannot "
            f"be gathered; give the model as it was before it was wrapped"
        )


def _refuse_lazy(model: torch.nn.Module, call: str) -> None:
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise WorkloadError(
            f"{call}: {lazy[0]} has no shape yet, since the model is lazy; run it once on a batch first"
        )


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (0 to 2**32 - 1), so that a loss draws the same again."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run a block with gradients enabled and autocast off, and afterwards restore what an experiment may change.

    Restored are the random generators, the gradient mode, and all settings that
    :func:`castwise.core.session.process.settings` lists.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(devices.same_random_numbers([devices.accelerator() or "cpu"]))
        stack.callback(put_settings, settings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in devices.autocast_types():
            stack.enter_context(frames.suspended(device))
        yield


@contextlib.contextmanager
def unspoilt(model: torch.nn.Module, call: str = "") -> Iterator[None]:
    """Restore a model after the block, in case the loss uses the original model instead of the copy that it is given.

    The model's gradients, buffers and all attributes of its modules, such as the training mode, are restored. Weights
    are not, since saving them would take a copy of every model. Instead, if ``call`` names the caller, an error is raised as
    soon as a backward pass reaches the original weights.

    Raises:
        WorkloadError: A backward pass reaches the original model and ``call`` is given, or the model has uninitialised lazy
            parameters.
    """
    _refuse_lazy(model, call)
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    managed = (
        {id(vars(m)["_parameters"]) for m in model.modules()} if is_cut(model) else set()
    )  # FSDP2 replaces these dictionaries' parameters when it gathers
    kept = [
        (d, d.copy())
        for m in model.modules()
        for d in (vars(m), *vars(m).values())
        if type(d) in _DICTS and id(d) not in managed
    ]

    def refuse(_parameter: torch.Tensor) -> None:
        raise not_given(model, call, "a backward reaches")

    leaves = [p for p in model.parameters() if p.requires_grad and p.is_leaf] if call else []
    hooks = [parameter.register_post_accumulate_grad_hook(refuse) for parameter in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for now, before in kept:
            if list(map(id, now.values())) != list(map(id, before.values())) or now.keys() != before.keys():
                now.clear()
                now.update(before)
        with torch.no_grad():
            for parameter, gradient, values in gradients:
                parameter.grad = gradient
                if gradient is not None and values is not None and not _equal(gradient, values):
                    gradient.copy_(values)
            for buffer, values in buffers:
                if not _equal(buffer, values):
                    buffer.copy_(values)


@contextlib.contextmanager
def unmoved(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Iterator[None]:
    """Restore after the block the optimizer's tensors that are not parameters of the model, and their gradients.

    A copy of the model does not copy these tensors, so the optimizer would change the user's own.
    """
    inside = {id(p) for p in model.parameters()}
    outside = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in inside]
    before = [(p, p.detach().clone(), p.grad, None if p.grad is None else p.grad.clone()) for p in outside]
    try:
        yield
    finally:
        for p, values, gradient, its_values in before:
            p.detach().copy_(values)
            p.grad = gradient
            if gradient is not None and its_values is not None:
                gradient.copy_(its_values)


def not_given(model: torch.nn.Module, call: str, what: str) -> WorkloadError:
    """Return the error for a loss that uses the original model instead of the given copy."""
    return WorkloadError(
        f"{call}: {what} the original {type(model).__name__}, but experiments run on copies; the loss must call the model "
        f"that it is "
        "given, and leave backward and the optimizer's step to castwise"
    )


_DICTS = (dict, collections.OrderedDict)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, or this rank's parts of two DTensors, are equal.

    ``torch.equal`` alone compares only dense tensors, and compares DTensors with collectives.
    """
    if is_dtensor(one):
        one, other = _torch.distributed.local_tensor(one), _torch.distributed.local_tensor(other)
    if one.layout is other.layout:
        one, other = _torch.tensors.to_dense(one), _torch.tensors.to_dense(other)
    return torch.equal(one, other)
