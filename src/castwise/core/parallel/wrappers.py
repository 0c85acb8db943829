"""Detect DistributedDataParallel and FSDP wrappers.

DistributedDataParallel wraps a model after it was prepared, without a call to castwise. But a public hook of torch runs
when a module becomes another's child, and it shows that a prepared model was wrapped. The same holds for FSDP1.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from castwise.core import _torch
from castwise.core.ranks.pieces import is_dtensor
from castwise.errors import StateError

_listeners: list[Callable[[DistributedDataParallel, nn.Module], None]] = []
_fsdp1_listeners: list[Callable[[nn.Module], None]] = []
_join_listeners: list[Callable[[DistributedDataParallel, int], None]] = []


def _announce(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if name == "module" and child is not None and isinstance(parent, DistributedDataParallel):
        for listener in _listeners:
            listener(parent, child)
    elif name == "_fsdp_wrapped_module" and child is not None and _torch.distributed.is_fsdp1(parent):
        for look in _fsdp1_listeners:
            look(child)


def refuse_fsdp1(call: str, module: nn.Module) -> None:
    """Raise for FSDP1 around or inside a prepared model: its flat parameters and norms do not work with a plan.

    Raises:
        StateError: Always.
    """
    raise StateError(
        f"{call}({type(module).__name__}): FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel) is not supported: it replaces "
        "parameters by flattened tensors, which a plan cannot assign to regions, and gradient norms would cover only one rank's "
        "shard. Use FSDP2: "
        "amp.fully_shard(model, blocks=...) before the optimizer is made and before prepare, or DistributedDataParallel after prepare."
    )


def on_join_end(listener: Callable[[DistributedDataParallel, int], None]) -> None:
    """Call ``listener(ddp, rank)`` on all ranks whenever torch's ``Join`` has given them the weights of one rank."""
    if not _join_listeners:
        _torch.distributed.on_join_end(lambda ddp, rank: [told(ddp, rank) for told in _join_listeners])
    if listener not in _join_listeners:
        _join_listeners.append(listener)


def on_fsdp1(listener: Callable[[nn.Module], None]) -> None:
    """Call ``listener(module)`` whenever FSDP1 wraps a module; listeners also get :func:`on_ddp`."""
    if listener not in _fsdp1_listeners:
        _fsdp1_listeners.append(listener)


def on_ddp(listener: Callable[[DistributedDataParallel, nn.Module], None]) -> None:
    """Call ``listener(ddp, module)`` whenever DistributedDataParallel wraps a module, before it broadcasts weights.

    Its process group exists by then.
    """
    if not _listeners:
        register_module_module_registration_hook(_announce)
    if listener not in _listeners:
        _listeners.append(listener)


def averaged_params(ddp: DistributedDataParallel, module: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradients a DistributedDataParallel averages.

    Raises:
        StateError: A parameter is sharded by tensor parallelism, which DistributedDataParallel does not support.
    """
    params = [p for name, p in module.named_parameters() if name not in ddp.parameters_to_ignore]
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter) or _torch.distributed.was_dtensor(parameter):
            raise StateError(
                f"DistributedDataParallel({type(module).__name__}): {name} is a DTensor, which DistributedDataParallel does not support under a plan. "
                "For data parallelism over tensor parallelism, use fully_shard(model, mesh=...) with the mesh (dp, 1, tp): "
                "fully_shard then replicates over dp and shards over one rank, which is data parallelism."
            )
    return params


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """A model and the modules inside its wrappers."""
    while True:
        yield model
        inner = _torch.calls.without_compiler(model)
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            inner = model.get_submodule("module")
        if inner is model:
            return
        model = inner


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and ``torch.compile``, in any order."""
    return [*_layers(model)][-1]


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel around or below a model, also inside ``torch.compile``; the innermost of several."""
    found = None
    for layer in _layers(model):
        found = layer if isinstance(layer, DistributedDataParallel) else found
    return found


def inside_ddp(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel; other modules are returned unchanged."""
    ddp = ddp_of(model)
    return model if ddp is None else ddp.get_submodule("module")


def ddp_around(module: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that already wraps a module. Searches all objects, so it takes some time."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    for thing in gc.get_objects():
        # isinstance would call into proxies, which answer with warnings
        inner = getattr(thing, "module", None) if issubclass(type(thing), DistributedDataParallel) else None
        if inner is not None and any(child is module for child in inner.modules()):
            found: DistributedDataParallel = thing
            return found
    return None
