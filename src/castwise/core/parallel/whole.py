"""Work with models that FSDP2 or tensor parallelism has sharded: find their ranks, and copy them whole to every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.parallel.wrappers import ddp_of
from castwise.core.ranks.group import ALONE, Ranks, first_line
from castwise.core.ranks.pieces import is_dtensor
from castwise.errors import WorkloadError

_USE = "looking"


def is_cut(model: nn.Module) -> bool:
    """Whether a model is sharded: ``fully_shard`` was called on one of its modules, or it holds a DTensor."""
    return any(map(_torch.distributed.is_fsdp, model.modules())) or any(map(is_dtensor, _tensors(model)))


def ranks_of(model: nn.Module) -> Ranks:
    """Return the processes that hold a model together.

    These are the ranks of the DistributedDataParallel around the model, or of the device meshes of its DTensors. For
    any other model, it is only this process. All of these processes must call the function. They communicate in a gloo
    group of their own.
    """
    ddp = ddp_of(model)
    if ddp is not None:
        return Ranks(ddp.process_group).duplicate(_USE)
    if not is_cut(model):
        return Ranks(ALONE)
    meshes = {tuple(_mesh(shard).mesh.flatten().tolist()) for shard in _shards(model).values()}
    return Ranks.among(meshes.pop(), _USE) if len(meshes) == 1 else Ranks().duplicate(_USE)


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole values of a DTensor, detached, on the device of its mesh.

    All ranks of the mesh must call this. Any other tensor is returned detached.
    """
    tensor = tensor.detach()
    if not is_dtensor(tensor):
        return tensor
    cut: Any = tensor.to(_mesh(tensor).device_type)
    return cut.full_tensor()  # type: ignore[no-any-return]


def whole_copy(model: nn.Module, call: str) -> nn.Module:
    """Return a copy of a sharded model that is not sharded, on every rank.

    The copy holds whole plain tensors, and its modules have the classes they had before sharding. Hooks, buffers,
    training modes and ``requires_grad`` are those of the model, which is not changed. All ranks of the model must call
    this. Each needs memory for all parameters, and while they are gathered also for twice the largest parameter.

    Raises:
        WorkloadError: A rank has not enough memory, or the model cannot be copied. All ranks raise it.
    """
    ranks, shards = ranks_of(model), _shards(model)
    room = ranks.each(lambda: _make_room([*dict.fromkeys(shards.values())], call))
    made: dict[Tensor, Tensor] = {}
    with torch.no_grad():
        for tensor in _tensors(model):
            shard = shards.get(tensor)
            if shard is not None and shard not in made:
                values = room[shard].copy_(gathered(shard))
                held = isinstance(tensor, nn.Parameter)
                made[shard] = nn.Parameter(values, tensor.requires_grad) if held else values
    of_form = {form: made[shard] for form, shard in shards.items() if shard in made}
    return ranks.each(lambda: _torch.distributed.copy_without_shards(model, of_form))


def held(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name.

    For parameters that FSDP2 has gathered, these are the shards, which optimizers and fp32 masters hold.
    """
    shards = _torch.distributed.fsdp_shards(model)
    return {name: shards.get(t, t) for name, t in (*model.named_parameters(), *model.named_buffers())}


def _make_room(shards: list[Tensor], call: str) -> dict[Tensor, Tensor]:
    """Allocate memory for the whole tensors of a sharded model, and check that there is enough to gather the largest.

    Returns:
        An uninitialised whole tensor for each sharded one.
    """
    try:
        room = {s: torch.empty(s.shape, dtype=s.dtype, device=_mesh(s).device_type) for s in shards}
        largest = max(room.values(), key=lambda values: values.nbytes, default=None)
        if largest is not None:
            torch.empty(2 * largest.nbytes, dtype=torch.uint8, device=largest.device)
    except (RuntimeError, MemoryError) as error:
        size = sum(shard.numel() * shard.element_size() for shard in shards) / 2**30
        raise WorkloadError(
            f"{call}: the model is sharded, and every rank needs memory for a whole copy of it, {size:.3g} GiB of parameters, "
            f"which is not available ({first_line(error)}); give the ranks more memory, or use a smaller model of the same kind"
        ) from error
    return room


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _mesh(shard: Tensor) -> Any:
    return shard.device_mesh  # type: ignore[attr-defined]


def _shards(model: nn.Module) -> dict[Tensor, Tensor]:
    """Return the DTensor behind each sharded parameter and buffer of a model."""
    return {t: t for t in _tensors(model) if is_dtensor(t)} | _torch.distributed.fsdp_shards(model)
