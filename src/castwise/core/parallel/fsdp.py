"""FSDP2: mixed-precision policies from a plan, and checks that the shard groups agree with the plan.

FSDP2 keeps each parameter as an fp32 shard and gathers it in ``param_dtype``: the shards are the masters of a plan that
stores parameters low. All parameters of a group are gathered in one dtype, so a region that stores its parameters in
another format needs a separate group.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch, masters
from castwise.core.model.resolve import Resolution, resolve
from castwise.core.model.stored import note_format
from castwise.core.plans.formats import LOW_DTYPES
from castwise.core.plans.plan import Plan
from castwise.errors import StateError


def _path_of(module: nn.Module, model: nn.Module) -> str:
    for path, inner in model.named_modules():
        if inner is module:
            return str(path)
    raise StateError(
        f"mp_policy: this {type(module).__name__} is not part of the given {type(model).__name__}; give the model that "
        f"contains it, before either is wrapped"
    )


def _policy(stored: torch.dtype | None) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=stored,
        reduce_dtype=torch.float32,
        output_dtype=None,
        cast_forward_inputs=False,  # the plan's borders cast inputs
    )


def mp_policy(plan: Plan, module: nn.Module | None, model: nn.Module | None) -> Any:
    """A ``MixedPrecisionPolicy`` for one shard group; see :meth:`castwise.Amp.mp_policy`."""
    if module is None:
        return _policy(plan.compute_dtype if plan.stores_low else None)
    if model is None:
        by_type = tuple(region for region in plan.regions if region.is_type)
        return _policy(resolve(dataclasses.replace(plan, regions=by_type), module).stored_in(""))
    return _policy(resolve(plan, model).stored_in(_path_of(module, model)))


def _own_groups(resolution: Resolution, model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are stored in another format than those of enclosing modules, innermost first."""
    found = []
    for path, module in model.named_modules():
        if path and next(module.parameters(), None) is not None:
            around = path.rpartition(".")[0]
            if resolution.stored_in(path) is not resolution.stored_in(around):
                found.append(module)
    return found[::-1]


def shard(
    resolution: Resolution, model: nn.Module, blocks: Iterable[nn.Module], options: dict[str, Any]
) -> None:
    """Call ``fully_shard`` on the regions that need their own groups, on ``blocks``, and on the model."""
    from torch.distributed.fsdp import fully_shard

    paths = {module: path for path, module in model.named_modules()}
    wanted = {*_own_groups(resolution, model), *blocks, model}
    for module in wanted - paths.keys():
        _path_of(module, model)
    for module in reversed([module for module in paths if module in wanted]):  # children before their parents
        fully_shard(module, mp_policy=_policy(resolution.stored_in(paths[module])), **options)


def _sharded(
    resolution: Resolution, model: nn.Module
) -> Iterator[tuple[str, str, Tensor, Any, torch.dtype | None]]:
    """Each parameter that FSDP2 manages: path of its group, name, itself, the group's policy, its format in the plan."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for path, _, parameter, policy in _torch.distributed.fsdp_groups(model):
        if parameter not in names:
            raise StateError(
                f"prepare: FSDP2 has gathered {path or type(model).__name__!r}, since the outermost module stays gathered "
                f"after a forward without a backward; prepare a sharded model before its first forward, or call reshard() of "
                f"that module first."
            )
        name = names[parameter]
        yield path, name, parameter, policy, resolution.stored_in(name.rpartition(".")[0])


def check_groups(resolution: Resolution, model: nn.Module) -> None:
    """Check that FSDP2 gathers every parameter in the format in which the plan stores it.

    Raises:
        StateError: FSDP2 gathers a parameter in another format; the error names the parameter, the group and the
            remedy.
    """
    for path, name, _, policy, want in _sharded(resolution, model):
        got = None if policy.param_dtype is torch.float32 else policy.param_dtype
        if got is not want:
            said = [str(dtype or torch.float32).removeprefix("torch.") for dtype in (got, want)]
            raise StateError(
                f"prepare: FSDP2 gathers {name} in {said[0]}, in the group of {path or type(model).__name__!r}, but the plan "
                f"{resolution.plan} stores it in {said[1]}. Shard by the plan: amp.fully_shard(model, blocks=...), or "
                "fully_shard(module, mp_policy=amp.mp_policy(module, model)) with a separate group for each region that "
                "stores parameters in another format."
            )


def check_shards(model: nn.Module, dtypes: Mapping[Tensor, torch.dtype]) -> None:
    """Check that shards still have the dtype of the model's first run, which FSDP2 assumes.

    Raises:
        StateError: The plan stores a shard in another dtype.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, known in _torch.distributed.fsdp_knows(model).items():
        wanted = dtypes.get(parameter, parameter.dtype)
        if wanted is not known:
            said = [str(dtype).removeprefix("torch.") for dtype in (known, wanted)]
            raise StateError(
                f"prepare: {names[parameter]} of this {type(model).__name__} was {said[0]} when FSDP2 ran it for the first time, "
                f"and the plan stores it in {said[1]}, which FSDP2 would not notice. Prepare each sharded model once, before "
                f"its first forward."
            )


def shard_dtypes(resolution: Resolution, model: nn.Module) -> dict[Tensor, torch.dtype]:
    """The new dtype of each shard.

    FSDP2 keeps shards in fp32, which serve as masters, and gathers them low; so they stay as they are, and those of
    trained parameters that arrived low become fp32. Under a plan without masters the shards are low, and so is the
    optimizer's state.
    """
    plan = resolution.plan
    found = {}
    for _, name, parameter, _, dtype in _sharded(resolution, model):
        found[parameter] = resolution.storage.get(name, parameter.dtype)
        if dtype is not None and plan.keeps_masters:
            becomes_master = parameter.requires_grad and parameter.dtype in LOW_DTYPES
            found[parameter] = torch.float32 if becomes_master else parameter.dtype
    return found


# --- shards that are frozen at first --------------------------------------------------------------------------


class _Frozen:
    """Parameters of a sharded model that may later train in other dtypes than FSDP2 and the plan expect."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._units = _torch.distributed.fsdp_units(model)
        low = _torch.distributed.fsdp_groups(model) if plan.keeps_masters else ()
        self._low = [weakref.ref(shard) for _, _, shard, _ in low if shard.dtype in LOW_DTYPES]
        """Shards that arrived low and stay so while they are frozen; trained ones are masters, in fp32."""

    def look(self) -> None:
        units = [unit for reference in self._units if (unit := reference()) is not None]
        low = [shard for reference in self._low if (shard := reference()) is not None and shard.requires_grad]
        if low or any(map(_torch.distributed.is_unfrozen, units)):
            own = set(map(id, low))
            for unit in units:
                _torch.distributed.look_again(unit, lambda shard: id(shard) in own and _widen(shard))
            self._low = [ref for ref in self._low if (shard := ref()) is not None and id(shard) not in own]


def _widen(shard: Tensor) -> bool:
    masters.store(shard, torch.float32)
    note_format(shard)
    return True


_frozen: weakref.WeakKeyDictionary[nn.Module, _Frozen] = weakref.WeakKeyDictionary()


def _look(model: nn.Module, *_: Any) -> None:
    """Hook before ``forward``; it holds no references, so models still pickle and copy."""
    known = _frozen.get(model)
    if known is not None and not torch.compiler.is_compiling():
        known.look()


def follow_unfreezing(model: nn.Module, plan: Plan, log: Callable[[Callable[[], None]], object]) -> None:
    """Make frozen shards trainable when they are unfrozen after the first run; ``log`` gets the undo entry."""
    if not _torch.distributed.fsdp_units(model):
        return
    alive = weakref.ref(model)

    def end() -> None:
        target = alive()
        if target is not None:
            _frozen.pop(target, None)
            _torch.hooks.remove_hooks(target, _look)

    log(end)
    _frozen[model] = _Frozen(model, plan)
    _torch.hooks.hook_first(model, _look)
