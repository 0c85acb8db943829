"""Implements the option ``zero = dict(...)``: FSDP2 shards parameters, gradients and optimizer state over data parallel ranks.

Colossal-AI refuses ``zero`` together with ``fp16``. Here they work together: the castwise plan of the AMP mode decides in which
format FSDP2 gathers the shards.
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
    """Return the :class:`Recipe` for a configuration that has ``zero`` but no ``fp16``.

    Its plan is that of the naive AMP mode, since Colossal-AI uses fp16 with fp32 master weights in this case. The options of
    the loss scale are read from ``optimizer_config``.
    """
    given = zero.get("optimizer_config") or {}
    recipe = naive_recipe({key: given[key] for key in _SCALES if key in given})
    return dataclasses.replace(recipe, mode="none")


def shard(amp: Amp, model: nn.Module, optimizer: Optimizer, zero: dict[str, Any]) -> None:
    """Shard a model over the data parallel ranks, in place, and make its optimizer update the shards.

    Args:
        amp: The castwise session. Its plan decides in which format shards are gathered.
        model: The unsharded model, equal on every rank. The children of each ``nn.ModuleList`` and ``nn.Sequential`` in it
            are gathered separately.
        optimizer: The optimizer of the unsharded parameters, before its first step.
        zero: The option ``zero``. ``level`` 3, or ``reshard_after_forward=True``, frees gathered weights after the forward
            pass. Levels 1 and 2 keep the weights.

    Raises:
        StateError: The optimizer has made a step already.
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
