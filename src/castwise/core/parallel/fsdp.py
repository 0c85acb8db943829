"""Make FSDP2's mixed-precision policies from a plan, and check that a sharded model agrees with the plan.

FSDP2 keeps each parameter as an fp32 shard and gathers it in ``param_dtype``. So if a plan stores parameters in bf16 or
fp16 with fp32 masters, the shards are the masters. Each call of ``fully_shard`` makes one group of parameters, all of
which are gathered in one dtype. A region that stores its parameters in another format therefore needs a group of its
own.
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
    """Return the ``MixedPrecisionPolicy`` for one call of ``fully_shard``; see :meth:`castwise.Amp.mp_policy`."""
    if module is None:
        return _policy(plan.compute_dtype if plan.stores_low else None)
    if model is None:
        by_type = tuple(region for region in plan.regions if region.is_type)
        return _policy(resolve(dataclasses.replace(plan, regions=by_type), module).stored_in(""))
    return _policy(resolve(plan, model).stored_in(_path_of(module, model)))


def _own_groups(resolution: Resolution, model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are stored in another format than those of the module around them.

    Inner modules come before the modules that contain them.
    """
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
    """Call ``fully_shard`` on ``blocks``, on the model, and on each region that stores parameters in a format of its own."""
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
    """Yield a tuple for each parameter that FSDP2 manages.

    The tuple holds the path of the module on which ``fully_shard`` was called, the parameter's name, the parameter, the
    ``MixedPrecisionPolicy``, and the bf16 or fp16 dtype in which the plan stores the parameter (None for fp32).
    """
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
    """Raise if FSDP2 gathers a parameter in another format than that in which the plan stores it.

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
    """Raise if a plan stores a shard in another dtype than it had in the model's first forward.

    FSDP2 assumes that this dtype does not change. ``dtypes`` holds the dtypes in which the plan stores the shards.

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
    """Return the dtype in which each FSDP2 shard is to be stored.

    Under a plan that stores parameters in bf16 or fp16 with fp32 masters, FSDP2 gathers fp32 shards in bf16 or fp16,
    and the shards serve as masters. So shards stay as they are, except that those of trained parameters that arrived in
    bf16 or fp16 become fp32. Under a plan without masters, the shards themselves are stored in bf16 or fp16, and so is
    the optimizer's state.
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
    """Watches a sharded model for frozen parameters that are unfrozen later, and adapts FSDP2 and their dtype then.

    FSDP2 records at the first forward in which dtypes it reduces gradients. Parameters that were frozen then would be
    trained with wrong dtypes.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._units = _torch.distributed.fsdp_units(model)
        low = _torch.distributed.fsdp_groups(model) if plan.keeps_masters else ()
        self._low = [weakref.ref(shard) for _, _, shard, _ in low if shard.dtype in LOW_DTYPES]
        """The frozen bf16 and fp16 shards. Once they are trained, they serve as fp32 masters, so they must become fp32."""

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
    """Look for unfrozen parameters before each ``forward``, as a hook.

    The hook holds no references to the model, so models with it can still be pickled and copied.
    """
    known = _frozen.get(model)
    if known is not None and not torch.compiler.is_compiling():
        known.look()


def follow_unfreezing(model: nn.Module, plan: Plan, log: Callable[[Callable[[], None]], object]) -> None:
    """Install a hook that lets frozen parameters of a sharded model train if they are unfrozen after the first forward.

    ``log`` is called with a function that removes the hook.
    """
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
