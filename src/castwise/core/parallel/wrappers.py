"""Detect that DistributedDataParallel or FSDP1 wraps a model.

A script may wrap a model after preparing it, without a call to castwise. A public hook of torch runs when a module
becomes the child of another module, so it shows that a prepared model was wrapped.
"""

from __future__ import annotations

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
    """Raise the error for FSDP1 around or inside a prepared model.

    A plan does not work with the flattened parameters of FSDP1, nor with gradient norms over its shards.

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
    """Register ``listener(ddp, rank)``, to be called on all ranks when torch's ``Join`` has given them one rank's weights."""
    if not _join_listeners:
        _torch.distributed.on_join_end(lambda ddp, rank: [told(ddp, rank) for told in _join_listeners])
    if listener not in _join_listeners:
        _join_listeners.append(listener)


def on_fsdp1(listener: Callable[[nn.Module], None]) -> None:
    """Register ``listener(module)``, to be called whenever FSDP1 wraps a module.

    Nothing is called before :func:`on_ddp` has been called once, because that installs the hook of torch.
    """
    if listener not in _fsdp1_listeners:
        _fsdp1_listeners.append(listener)


def on_ddp(listener: Callable[[DistributedDataParallel, nn.Module], None]) -> None:
    """Register ``listener(ddp, module)``, to be called whenever DistributedDataParallel wraps a module.

    The call comes before DistributedDataParallel broadcasts weights, and after its process group exists.
    """
    if not _listeners:
        register_module_module_registration_hook(_announce)
    if listener not in _listeners:
        _listeners.append(listener)


def averaged_params(ddp: DistributedDataParallel, module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module whose gradients a DistributedDataParallel averages.

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
    """Yield a model and, from the outside in, the modules that it wraps as DistributedDataParallel and similar do."""
    while True:
        yield model
        inner = _torch.calls.without_compiler(model)
        if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            inner = model.get_submodule("module")
        if inner is model:
            return
        model = inner


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and ``torch.compile``, however they are nested."""
    return [*_layers(model)][-1]


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that a model is or wraps, also inside ``torch.compile``, or None.

    If several are nested, the innermost is returned.
    """
    found = None
    for layer in _layers(model):
        found = layer if isinstance(layer, DistributedDataParallel) else found
    return found


def inside_ddp(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, or the module itself if it is not wrapped."""
    ddp = ddp_of(model)
    return model if ddp is None else ddp.get_submodule("module")


def ddp_around(module: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that already wraps a module, or None.

    This searches all objects of the process, so it takes some time.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    for thing in _torch.tensors.living(DistributedDataParallel):
        inner = getattr(thing, "module", None)
        if inner is not None and any(child is module for child in inner.modules()):
            found: DistributedDataParallel = thing
            return found
    return None
