"""FSDP2: the plan as a policy of its shard groups, and whether the groups are as the plan wants them.

FSDP2 keeps each parameter as an fp32 shard and gathers it in ``param_dtype``: the shards are the masters of a plan that
stores parameters low. All parameters of a group are gathered in one dtype, so a region that stores its parameters in
another format is a group of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from castwise import _torch, regions
from castwise.errors import StateError
from castwise.formats import FORMATS
from castwise.plan import Plan

__all__ = ["check_groups", "mp_policy", "own_groups", "shard", "sharded_params"]


def sharded_params(model: nn.Module) -> dict[Tensor, str]:
    """The parameters of a model that FSDP2 manages, with the paths of their groups."""
    return {parameter: path for path, _, parameter, _ in _torch.fsdp_groups(model)}


def _path_of(module: nn.Module, model: nn.Module) -> str:
    for path, inner in model.named_modules():
        if inner is module:
            return str(path)
    raise StateError(
        f"mp_policy: this {type(module).__name__} is not part of the given {type(model).__name__}; give the model that it is "
        "in, before either is wrapped"
    )


def _stored_in(plan: Plan, path: str, assigned: dict[str, Any]) -> torch.dtype | None:
    stored = regions.stored_format(plan, regions.owner(path, assigned))
    return None if stored in (None, "fp32") else FORMATS[str(stored)].dtype


def mp_policy(plan: Plan, module: nn.Module | None, model: nn.Module | None) -> Any:
    """A ``MixedPrecisionPolicy`` for one shard group; see :meth:`castwise.Amp.mp_policy`."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    stored = plan.compute_dtype if plan.stores_low else None
    if module is not None and model is not None:
        stored = _stored_in(plan, _path_of(module, model), regions.assign(model, plan.regions))
    elif module is not None:
        types = tuple(region for region in plan.regions if region.is_type)
        mine = regions.assign(module, types).get("")
        if mine is not None:
            stored = _stored_in(plan, "", {"": mine})
    return MixedPrecisionPolicy(
        param_dtype=stored,
        reduce_dtype=torch.float32,
        output_dtype=None,
        cast_forward_inputs=False,  # the plan's borders cast inputs
    )


def own_groups(plan: Plan, model: nn.Module) -> list[nn.Module]:
    """The modules with parameters that the plan stores otherwise than the modules around them, innermost first."""
    assigned = regions.assign(model, plan.regions)
    found = []
    for path, module in model.named_modules():
        if path and next(module.parameters(), None) is not None:
            around = path.rpartition(".")[0]
            if _stored_in(plan, path, assigned) is not _stored_in(plan, around, assigned):
                found.append(module)
    return found[::-1]


def shard(plan: Plan, model: nn.Module, blocks: Iterable[nn.Module], options: dict[str, Any]) -> None:
    """``fully_shard`` on the regions that need groups of their own, on ``blocks``, and on the model."""
    from torch.distributed.fsdp import fully_shard

    wanted = [*own_groups(plan, model), *blocks]
    inner = {id(module) for module in wanted}
    policies = {id(module): mp_policy(plan, module, model) for module in [*wanted, model]}
    order = [module for module in model.modules() if id(module) in inner and module is not model]
    for module in [*reversed(order), model]:  # children before their parents
        fully_shard(module, mp_policy=policies[id(module)], **options)


def check_groups(plan: Plan, model: nn.Module) -> None:
    """See that FSDP2 gathers every parameter in the format that the plan stores it in.

    Raises:
        StateError: It does not; names the parameter, the group and what to do.
    """
    groups = _torch.fsdp_groups(model)
    if not groups:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    assigned = regions.assign(model, plan.regions)
    for path, module, parameter, policy in groups:
        name = names.get(id(parameter), "?")
        want = _stored_in(plan, name.rpartition(".")[0], assigned)
        got = None if policy.param_dtype is torch.float32 else policy.param_dtype
        if got is not want:
            said = [str(dtype or torch.float32).removeprefix("torch.") for dtype in (got, want)]
            raise StateError(
                f"prepare: FSDP2 gathers {name} in {said[0]}, in the group of {path or type(module).__name__!r}, but the plan "
                f"{plan} has it in {said[1]}. Shard by the plan: amp.fully_shard(model, blocks=...), or fully_shard(module, "
                "mp_policy=amp.mp_policy(module, model)) with a group of its own for each region that stores parameters in "
                "another format."
            )


def store_shards(plan: Plan, model: nn.Module) -> None:
    """Under a plan without masters keep the shards themselves low, as the plan says; the optimizer's state follows."""
    if not plan.stores_low or plan.keeps_masters:
        return
    assigned = regions.assign(model, plan.regions)
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    for _, _, parameter, _ in _torch.fsdp_groups(model):
        dtype = _stored_in(plan, names.get(id(parameter), "").rpartition(".")[0], assigned)
        if dtype is not None and parameter.dtype is not dtype:
            _torch.store_dtensor(parameter, dtype)
