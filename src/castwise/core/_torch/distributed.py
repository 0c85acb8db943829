"""Private API of ``torch.distributed``: DTensor, FSDP, DistributedDataParallel, pipelines and process groups."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from castwise.core._torch.hooks import around_function, remove_hooks
from castwise.core._torch.tensors import _set_data


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, sharing its memory.

    ``to_local()`` would add a node to the autograd graph.
    """
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    wait = getattr(local, "wait", None)  # the result of a collective that may still be running
    return local if wait is None or type(local) is torch.Tensor else wait()


def dispatches_itself(tensor: torch.Tensor) -> bool:
    """Whether operators on a tensor run ``__torch_dispatch__`` of its class. False for fake tensors."""
    kind: Any = type(tensor)
    own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return own and not kind.__module__.startswith("torch._subclasses")


def local_box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and the sizes of this rank's part of a tensor in the whole tensor.

    If the tensor is no DTensor, the part is the whole tensor. torch.distributed.checkpoint reads the same values from
    DTensors.
    """
    if not hasattr(tensor, "device_mesh"):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return tuple(chunk.offsets), tuple(chunk.sizes)


def set_dtensor(parameter: torch.Tensor, values: Any) -> None:
    """Make a DTensor use the memory of another DTensor, as ``parameter.data = values`` does for plain tensors.

    With DTensors, that assignment would change the metadata but not the memory. ``torch.utils.swap_tensors`` is no
    alternative, since it refuses tensors with weak references.
    """
    _set_data(parameter, values)
    parameter._local_tensor = values._local_tensor  # type: ignore[attr-defined]
    parameter._spec = values._spec  # type: ignore[attr-defined]


def was_dtensor(parameter: torch.Tensor) -> bool:
    """Whether a parameter was a DTensor before ``DistributedDataParallel(device_mesh=...)`` made it a local tensor."""
    return hasattr(parameter, "_st_info")


def fsdp_groups(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, torch.nn.Parameter, Any]]:
    """Return an entry for each parameter that ``fully_shard`` manages.

    Each entry holds the path of the module that ``fully_shard`` was called on, this module, the sharded parameter, and
    its ``MixedPrecisionPolicy``.
    """
    return [
        (path, module, param.sharded_param, group.mp_policy)
        for path, module, group in _fsdp_param_groups(model)
        for param in group.fsdp_params
    ]


def default_store() -> Any:
    """Return the rendezvous store of the default process group. The store is thread-safe."""
    return torch.distributed.distributed_c10d._get_default_store()


def is_in_join(ddp: Any) -> bool:
    """Whether a DistributedDataParallel is running inside torch's ``Join`` context manager for uneven inputs."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def on_join_end(listener: Callable[[Any, int], object]) -> None:
    """Call ``listener(ddp, rank)`` on every rank at the end of torch's ``Join``, which copies the weights of ``rank`` to all."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def sync_final_model(ddp: Any, is_last_joiner: bool) -> None:
            original(ddp, is_last_joiner)
            listener(ddp, ddp._authoritative_rank)

        return sync_final_model

    around_function(torch.nn.parallel.DistributedDataParallel, "_sync_final_model", around)


def delays_reductions(ddp: Any) -> bool:
    """Whether a DistributedDataParallel was given ``delay_all_reduce_named_params``."""
    return bool(getattr(ddp, "_delay_all_reduce_params", None))


def _is_loaded(thing: Any, module: str, name: str) -> bool:
    """Whether an object is an instance of a class that may not have been imported."""
    return isinstance(thing, getattr(sys.modules.get(module), name, ()))


def is_zero(optimizer: Any) -> bool:
    """Whether an optimizer is torch's ZeroRedundancyOptimizer."""
    return _is_loaded(
        optimizer, "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"
    )


def is_fsdp1(module: Any) -> bool:
    """Whether a module is FSDP1's FullyShardedDataParallel."""
    return _is_loaded(
        module, "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"
    )


def has_fsdp1(model: torch.nn.Module) -> bool:
    """Whether FSDP1 manages parameters of a model, through a wrapper inside the model or around the model."""
    return any(map(is_fsdp1, model.modules())) or any(
        getattr(parameter, "_fsdp_flattened", False) for parameter in model.parameters()
    )


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` or ``replicate`` was called on this module itself.

    ``replicate`` is built on ``fully_shard``.
    """
    return hasattr(
        type(module), "_get_fsdp_state"
    )  # the class is asked, since a wrapper may forward attributes of its instance


def fsdp_shards(model: torch.nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Map each parameter that FSDP2 may register with its module to its sharded parameter.

    The keys are the sharded and the gathered forms of each parameter that exist.
    """
    return {
        form: param.sharded_param
        for _, _, group in _fsdp_param_groups(model)
        for param in group.fsdp_params
        for name in ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        if (form := getattr(param, name, None)) is not None
    }


def copy_without_shards(model: torch.nn.Module, wholes: dict[torch.Tensor, torch.Tensor]) -> torch.nn.Module:
    """Return a deep copy of a model without what ``fully_shard`` and ``parallelize_module`` add: states, hooks and classes.

    The classes that ``fully_shard`` creates cannot be copied, and their states hold process groups.

    Args:
        model: The model to copy, which is unchanged afterwards.
        wholes: Maps parameters and buffers of the model to the tensors that replace them in the copy.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    sharded = [(module, type(module)) for module in model.modules() if is_fsdp(module)]
    memo: dict[int, Any] = {id(tensor): whole for tensor, whole in wholes.items()}
    memo |= {id(module._get_fsdp_state()): object() for module, _ in sharded}  # type: ignore[operator]
    try:
        for module, kind in sharded:
            module.__class__ = kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]
        out = copy.deepcopy(model, memo)
    finally:
        for module, kind in sharded:
            module.__class__ = kind
    for module in out.modules():
        own = vars(module)
        tables = [own[name] for name in own if "_hooks" in name and isinstance(own[name], dict)]
        hooks = [getattr(hook, "hook", hook) for table in tables for hook in table.values()]
        remove_hooks(module, *(hook for hook in hooks if _is_of_parallelism(hook)))
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_distribute_module_applied"):
            own.pop(name, None)
        for name in (STATE_KEY, REGISTRY_KEY):
            for api in [api for api in own.get(name, ()) if getattr(api, "__name__", api) in _SHARDING]:
                del own[name][api]
            if not own.get(name, True):
                del own[name]
        for name, value in list(
            own.items()
        ):  # methods set on the instance by register_fsdp_forward_method, which shadow the class's
            if isinstance(value, MethodType) and _defined_in(value.__func__).startswith(_FSDP):
                del own[name]
    return out


_SHARDING = ("fully_shard", "replicate")
_FSDP = "torch.distributed.fsdp."


def _is_of_parallelism(hook: Any) -> bool:
    home = str(getattr(hook, "__module__", ""))
    return home.startswith((_FSDP, "torch.distributed.tensor.", "torch.distributed._composable.replicate"))


def _defined_in(function: Any) -> str:
    """Return the name of the module in which a function was defined.

    For a wrapped function it is the wrapper's module.
    """
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def fsdp_knows(model: torch.nn.Module) -> dict[torch.nn.Parameter, torch.dtype]:
    """Map each sharded parameter to the dtype that FSDP2 recorded when the model first ran.

    Before the model has run, the result is empty.
    """
    params = (param for _, _, group in _fsdp_param_groups(model) for param in group.fsdp_params)
    return {param.sharded_param: param.orig_dtype for param in params if hasattr(param, "orig_dtype")}


def _fsdp_param_groups(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    for path, module in model.named_modules():
        if not is_fsdp(module):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # a list since torch 2.12
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        yield from ((path, module, group) for group in groups)


def fsdp_units(model: torch.nn.Module) -> list[weakref.ref[Any]]:
    """Return weak references to FSDP2's parameter groups of a model. FSDP2 gathers and reduces each group as a unit."""
    return [weakref.ref(group) for _, _, group in _fsdp_param_groups(model)]


def is_unfrozen(unit: Any) -> bool:
    """Whether a parameter group of FSDP2 had no trained parameter when the model first ran, but has one now."""
    return getattr(unit, "_orig_dtype", unit) is None and any(
        param.sharded_param.requires_grad for param in unit.fsdp_params
    )


def look_again(unit: Any, widen: Callable[[torch.Tensor], bool]) -> None:
    """Make FSDP2 determine the gradient dtypes of a parameter group again, from the parameters that are trained now.

    Otherwise, parameters that were frozen when the model first ran would get gradients in the dtype in which FSDP2
    gathers them.

    Args:
        unit: A parameter group that :func:`fsdp_units` returned.
        widen: Called with the sharded form of each trained parameter. Stores it in another dtype if needed, and returns
            whether it did.
    """
    trained = [param for param in unit.fsdp_params if param.sharded_param.requires_grad]
    widened = [param for param in trained if widen(param.sharded_param)]
    if hasattr(unit, "_orig_dtype"):  # otherwise the model has not run yet
        if widened and not unit.is_sharded:
            unit._to_sharded()
        for param in widened:
            param.reset_sharded_param()
        unit._init_mp_dtypes()


def schedule_stages(schedule: Any) -> list[Any]:
    """Return the stages that this rank runs in a schedule of ``torch.distributed.pipelining``."""
    many = getattr(schedule, "_stages", None)
    return list(many) if many is not None else [schedule._stage]


def replace_schedule_loss(
    schedule: Any, wrap: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]
) -> None:
    """Make a pipeline schedule compute its loss with ``wrap(loss_fn)``. A schedule without a loss is left unchanged."""
    if schedule._loss_fn is not None:
        schedule._loss_fn = wrap(schedule._loss_fn)


def take_gradient_division(schedule: Any) -> int:
    """Stop a pipeline schedule from dividing gradients by its number of microbatches.

    Returns:
        The number of microbatches, or 1 if the schedule did not divide gradients.
    """
    parts = int(schedule._n_microbatches) if schedule.scale_grads else 1
    schedule.scale_grads = False
    return parts
