"""Everything that a plan could change about models, optimizers and the process, as plain values to compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core.casting import frames, kernels
from tests.here import DEVICE

_MODULE_HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]
_OPTIMIZER_HOOKS = [name for name in vars(torch.optim.SGD([torch.zeros(1)])) if "hooks" in name]


def of_process() -> dict[str, Any]:
    """Record settings of the thread and of the process."""
    backends = torch.backends.mkldnn
    return {
        "autocast": torch.is_autocast_enabled(DEVICE),
        "autocast dtype": torch.get_autocast_dtype(DEVICE),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "frames": frames.depth(),
        "override kernels": sorted(kernels.registered(DEVICE)),
        "fp32 precision": (backends.matmul.fp32_precision, backends.conv.fp32_precision),
    }


def bits(tensor: Tensor | None) -> Any:
    """Return a tensor's format and exact content; NaN equals itself here."""
    if tensor is None:
        return None
    kind = f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} "
    if tensor.is_floating_point():
        tensor = (
            tensor
            .detach()
            .contiguous()
            .view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()])
        )
    return kind + str(tensor.tolist())


def of_model(model: nn.Module, values: bool = True) -> dict[str, Any]:
    """Record the tensors of a model and what is attached to its modules.

    Args:
        model: In any state.
        values: Include the content of tensors and gradients, not only how they are stored.
    """
    seen: dict[str, Any] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        seen[f"{name}: identity"] = id(tensor)
        seen[f"{name}: dtype"] = tensor.dtype
        seen[f"{name}: memory format"] = tensor.stride()
        seen[f"{name}: class"] = type(tensor)
        seen[f"{name}: requires_grad"] = tensor.requires_grad
        seen[f"{name}: own attributes"] = sorted(vars(tensor))
        if tensor.is_leaf and tensor.is_floating_point():
            seen[f"{name}: grad_dtype"] = tensor.grad_dtype
        if values:
            seen[f"{name}: value"] = bits(tensor)
            seen[f"{name}: gradient"] = bits(tensor.grad)
    for path, module in model.named_modules():
        seen[f"{path or 'model'}: class"] = type(module)
        seen[f"{path or 'model'}: attributes"] = sorted(vars(module))
        seen[f"{path or 'model'}: training"] = module.training
        for hooks in _MODULE_HOOKS:
            found = getattr(module, hooks)
            seen[f"{path or 'model'}: {hooks}"] = list(found) if hasattr(found, "__len__") else found
        if isinstance(module, nn.RNNBase):
            own = [getattr(module, name) for name in module._flat_weights_names]
            seen[f"{path}: flat weights"] = [a is b for a, b in zip(own, module._flat_weights, strict=True)]
    return seen


def of_optimizers(optimizers: Iterable[Optimizer], values: bool = True) -> dict[str, Any]:
    """Record groups, hooks and state of optimizers."""
    seen: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        at = f"{type(optimizer).__name__} {number}"
        seen[f"{at}: attributes"] = sorted(vars(optimizer))
        seen[f"{at}: defaults"] = dict(optimizer.defaults)
        seen[f"{at}: scales by itself"] = getattr(optimizer, "_step_supports_amp_scaling", False)
        for hooks in _OPTIMIZER_HOOKS:
            seen[f"{at}: {hooks}"] = list(getattr(optimizer, hooks))
        for index, group in enumerate(optimizer.param_groups):
            seen[f"{at}: group {index}"] = {key: v for key, v in group.items() if key != "params"}
            seen[f"{at}: parameters {index}"] = [id(p) for p in group["params"]]
        if values:
            seen[f"{at}: state"] = state_of(optimizer)
    return seen


def state_of(optimizer: Optimizer) -> list[Any]:
    """Return each parameter's state in order, with whether its strides equal the parameter's."""
    out = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            out.append({
                key: (bits(value), value.stride() == parameter.stride() or value.shape != parameter.shape)
                if isinstance(value, Tensor) else value
                for key, value in state.items()
            })  # fmt: skip
    return out


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """List what changed."""
    return [
        f"{key}: {before.get(key, 'nothing')!s:.60} -> {after.get(key, 'nothing')!s:.60}"
        for key in [*before, *(key for key in after if key not in before)]
        if before.get(key, "nothing") != after.get(key, "nothing")
    ]
