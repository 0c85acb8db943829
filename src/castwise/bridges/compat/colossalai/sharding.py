"""``zero = dict(...)``: parameters, gradients and optimizer state sharded over data parallel ranks, by FSDP2.

Colossal-AI refuses ``zero`` with ``fp16``; here the plan of any mode decides in which format shards are gathered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from castwise import Amp
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.bridges.compat.colossalai.logging import get_dist_logger
from castwise.bridges.compat.colossalai.plans import Recipe, naive_recipe
from castwise.errors import StateError

__all__ = ["shard", "zero_recipe"]

_SCALES = (
    "initial_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_scale", "max_scale",
)  # fmt: skip
_READ = ("level", "reshard_after_forward", "model_config", "optimizer_config")


def zero_recipe(zero: Mapping[str, Any]) -> Recipe:
    """The recipe for ``zero`` without ``fp16``: the naive plan, since Colossal-AI uses fp16 with fp32 masters there.

    The loss scale's options are those of ``optimizer_config``.
    """
    given = zero.get("optimizer_config") or {}
    recipe = naive_recipe({key: given[key] for key in _SCALES if key in given})
    return dataclasses.replace(recipe, mode="none")


def shard(amp: Amp, model: nn.Module, optimizer: Optimizer, zero: dict[str, Any]) -> None:
    """Shard a model over the data parallel ranks, in place, and let its optimizer update the shards.

    Args:
        amp: The session, whose plan decides the formats.
        model: The whole model, equal on every rank; each module of its ``nn.ModuleList`` and ``nn.Sequential`` is
            gathered separately.
        optimizer: Optimizer of the whole parameters; it has not stepped yet.
        zero: ``level`` (3 frees weights after the forward pass, 1 and 2 keep them) or ``reshard_after_forward``.

    Raises:
        StateError: The optimizer has state already.
    """
    if optimizer.state:
        raise StateError(
            f"initialize with zero: this {type(optimizer).__name__} has already made a step, so its state belongs to "
            "unsharded parameters; make a new optimizer"
        )
    ignored = sorted(set(zero) - set(_READ))
    if ignored:
        get_dist_logger().warning(
            f"zero: {', '.join(ignored)} are not used, because FSDP2 does the sharding; the options used are "
            f"{', '.join(_READ)}",
            ranks=[0],
        )
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    blocks = [
        child
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and module is not model
        for child in module
        if any(True for _ in child.parameters()) and not isinstance(child, nn.ModuleList)
    ]
    fully = zero.get("reshard_after_forward", zero.get("level", 3) == 3)
    amp.fully_shard(model, blocks=blocks, mesh=gpc.device_mesh["data"], reshard_after_forward=bool(fully))
    shards = dict(model.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        # in place: the optimizer may reference the list
        group["params"][:] = [shards[names[id(p)]] if id(p) in names else p for p in group["params"]]
