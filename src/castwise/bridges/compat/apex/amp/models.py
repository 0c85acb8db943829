"""Casts whole models and prepares their optimizers, for the optimization levels ``O0``, ``O2`` and ``O3``."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from castwise import Amp, Plan, Region
from castwise.bridges.compat.apex.amp._amp_state import master_params, warn_or_err
from castwise.bridges.compat.apex.amp.ambient import FORMATS
from castwise.core.casting import default_device_type, hook_first
from castwise.core.masters import make_pickles_plain, master_of, model_param_of, refresh_master

__all__ = [
    "base_of",
    "cast_models",
    "check_models",
    "check_optimizers",
    "check_params_fp32",
    "device_type_of",
    "install_casts",
]


def base_of(optimizer: Any) -> Any:
    """Return the torch optimizer that a LARC wrapper holds. Any other optimizer is returned unchanged."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def device_type_of(models: Sequence[nn.Module]) -> str:
    """Return the device type of the models' tensors. Without tensors it is the available accelerator's, else ``cpu``."""
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            if torch.amp.is_autocast_available(tensor.device.type):
                return tensor.device.type
    return default_device_type()


# --- checks -------------------------------------------------------------------------------------------------


def check_models(models: Sequence[nn.Module]) -> None:
    """Raise if a model is already wrapped for data parallelism.

    Raises:
        RuntimeError: A model is an instance of a data-parallel wrapper. The message is Apex's.
    """
    from castwise.bridges.compat.apex.parallel import DistributedDataParallel

    for model in models:
        for kind, name in (
            (DistributedDataParallel, "apex.parallel.DistributedDataParallel"),
            (nn.parallel.DistributedDataParallel, "torch.nn.parallel.DistributedDataParallel"),
            (nn.parallel.DataParallel, "torch.nn.parallel.DataParallel"),
        ):
            if isinstance(model, kind):
                raise RuntimeError(
                    f"Incoming model is an instance of {name}. Parallel wrappers should only be applied to the model(s) "
                    "AFTER \nthe model(s) have been returned from amp.initialize."
                )


def check_params_fp32(models: Sequence[nn.Module]) -> None:
    """Raise if a model is already stored in half.

    Raises:
        RuntimeError: A parameter or buffer has dtype fp16 or bf16. The message is Apex's.
    """
    for model in models:
        for what, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in tensors:
                if tensor.dtype in FORMATS:
                    wanted = "torch.cuda.FloatTensor" if tensor.is_cuda else "torch.FloatTensor"
                    warn_or_err(
                        f"Found {what} {name} with type {tensor.type()}, expected {wanted}.\n"
                        "When using amp.initialize, you do not need to call .half() on your model\n"
                        "before passing it, no matter what optimization level you choose."
                    )


def check_optimizers(optimizers: Sequence[Any], cast: Sequence[nn.Module] = ()) -> None:
    """Raise if an optimizer is given twice, or if its parameters are neither fp32 nor half.

    Parameters of the models in ``cast`` may have any dtype, since they will be cast.

    Raises:
        RuntimeError: An optimizer is given twice, or an earlier ``initialize`` has prepared it.
        TypeError: Parameters have another dtype.
    """
    seen: set[int] = set()
    will_fit = {id(parameter) for model in cast for parameter in model.parameters()}
    for optimizer in optimizers:
        if hasattr(optimizer, "_amp_stash") or id(optimizer) in seen:
            raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
        seen.add(id(optimizer))
        for parameter in master_params(optimizer):
            if parameter.dtype not in (torch.float32, *FORMATS) and id(parameter) not in will_fit:
                raise TypeError(
                    "Optimizer's parameters must be either torch.cuda.FloatTensor or torch.cuda.HalfTensor. "
                    f"Received {parameter.type()}"
                )


# --- casting ------------------------------------------------------------------------------------------------


def _regions(model: nn.Module, keep: bool, low: str) -> tuple[Region, ...]:
    """Return the regions of a castwise plan that store a model in the format ``low``.

    If ``keep``, BatchNorm modules that have weights are stored in fp32, as in Apex.
    """
    every = Region("**", params=low)
    if not keep:
        return (every,)
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    plain = [Region(name, params=low) for name, module in norms if name and not module.affine]
    return (every, Region("type:_BatchNorm", params="fp32"), *plain)


def cast_models(
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    properties: Any,
    outputs: torch.dtype | None,
) -> None:
    """Store models in ``properties.cast_model_type``, and cast their inputs and outputs.

    Floating outputs are cast to ``outputs``, or to fp32 if that is None. Optimizers get fp32 master weights if
    ``properties.master_weights`` is set.

    Raises:
        RuntimeError: ``cast_model_type`` is none of fp16, bf16 and fp32.
    """
    dtype = properties.cast_model_type
    if dtype is not torch.float32 and dtype not in FORMATS:
        raise RuntimeError(
            f"cast_model_type was {dtype}; allowed: torch.float16, torch.bfloat16, torch.float32, or False for no cast."
        )
    _store_in_fp32(models if dtype is torch.float32 else [*filter(_in_fp64, models)], optimizers)
    for model in models if dtype in FORMATS else ():
        low = FORMATS[dtype]
        plan = Plan(
            compute=low,
            params="compute",
            master="fp32" if properties.master_weights else "none",
            rules="none",
            regions=_regions(model, bool(properties.keep_batchnorm_fp32), low),
            output="fp32" if outputs is None else "as_is",
        )
        own = {id(parameter) for parameter in model.parameters()}
        mine = [o for o in optimizers if any(id(model_param_of(p)) in own for p in master_params(o))]
        # Apex's loss scalers, not castwise, decide which steps are skipped
        Amp(plan, device=device_type_of([model]), nonfinite="allow").prepare(model, *map(base_of, mine))
    install_casts(models, dtype, torch.float32 if outputs is None else outputs)
    for model in models:
        for module in model.modules():
            module.register_state_dict_post_hook(state_dict_in_fp32)


def _in_fp64(model: nn.Module) -> bool:
    return any(parameter.dtype is torch.float64 for parameter in model.parameters())


def _store_in_fp32(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
    """Cast models to fp32, and the optimizer state of their parameters with them, as Apex does.

    The state is cast by loading it into the optimizer again.
    """
    params = [parameter for model in models for parameter in model.parameters()]
    cast = {id(parameter) for parameter in params if parameter.dtype is not torch.float32}
    for model in models:
        model.to(torch.float32)
    for optimizer in map(base_of, optimizers):
        if optimizer.state and any(id(parameter) in cast for parameter in master_params(optimizer)):
            optimizer.load_state_dict(optimizer.state_dict())


def install_casts(models: Sequence[nn.Module], inputs: torch.dtype | None, outputs: torch.dtype) -> None:
    """Install forward hooks that cast the outputs of models and, unless ``inputs`` is None, their inputs."""
    casts = Casts(inputs, outputs)
    make_pickles_plain()
    for model in models:
        if inputs is not None:
            hook_first(model, casts.enter, with_kwargs=True)
        model.register_forward_hook(casts.leave)


@dataclasses.dataclass(frozen=True)
class Casts:
    """Forward hooks that cast floating tensors to ``inputs`` and ``outputs``, as Apex does.

    Tensors in containers of any kind are cast, and objects that have a method ``to``.
    """

    inputs: torch.dtype | None
    outputs: torch.dtype

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast the arguments of the model, as a forward pre-hook."""
        assert self.inputs is not None
        return apply_cast(args, self.inputs), apply_cast(kwargs, self.inputs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast the output of the model, as a forward hook."""
        return apply_cast(output, self.outputs)


def apply_cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a floating tensor, or the floating tensors in a container. A container is rebuilt as the same type.

    Named tuples, dataclasses and objects with a method ``to(dtype)`` are cast too. Anything else is returned unchanged.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype is not dtype and value.is_floating_point() else value
    if value is None or isinstance(value, (str, bytes, int, float, nn.Module)):
        return value
    if isinstance(value, Mapping):
        changed = {key: new for key, item in value.items() if (new := apply_cast(item, dtype)) is not item}
        if not changed:
            return value
        rebuilt: Any = copy.copy(value)
        for key, item in changed.items():
            rebuilt[key] = item
        return rebuilt
    if isinstance(value, (tuple, list, set, frozenset)) and not isinstance(value, PackedSequence):
        items = [apply_cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if callable(getattr(value, "to", None)):
        return value.to(dtype)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: apply_cast(getattr(value, f.name), dtype) for f in dataclasses.fields(value) if f.init
        }
        return dataclasses.replace(value, **fields)
    return value


def state_dict_in_fp32(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Replace a module's own half-precision entries in the state dict by fp32 ones, as a state-dict hook of the module.

    A weight gets the value of its fp32 master weight, so that a training resumed from the state dict continues exactly. Apex
    instead converts the weights rounded to half. With ``keep_vars``, the parameters themselves are returned.
    """
    own = (
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False),
    )
    for name, tensor in own:
        held = state_dict.get(prefix + name)
        if not isinstance(held, torch.Tensor) or held.dtype not in FORMATS or held is tensor:
            continue
        master = master_of(tensor)
        if isinstance(tensor, nn.Parameter):
            refresh_master(tensor)  # its values may have been changed by hand
        state_dict[prefix + name] = held.float() if master is None else master.data
