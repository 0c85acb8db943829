"""What ``prepare`` refuses, and what it stores otherwise for inference."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from castwise import _torch, masters, regions
from castwise.errors import PlanError, StateError
from castwise.parallel import wrappers
from castwise.plan import Plan

__all__ = ["check_model", "check_optimizer", "check_parameters", "inference_dtypes"]

_LOW = (torch.bfloat16, torch.float16)


def check_model(model: nn.Module, device_type: str) -> nn.Module:
    """The module that a session is to prepare: that inside ``torch.compile``'s.

    Raises:
        StateError: No module, wrapped or compiled too early, or on another device.
    """
    if not isinstance(model, nn.Module):
        raise StateError(
            f"prepare({type(model).__name__}): not an nn.Module; prepare each model by a call of its own"
        )
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise StateError(
            f"prepare({type(model).__name__}): prepare the module first and wrap it after: "
            f"{type(model).__name__}(amp.prepare(module))"
        )
    if wrappers.ddp_around(model) is not None:
        raise StateError(
            f"prepare({type(model).__name__}): this module is inside a DistributedDataParallel already; prepare it first and "
            "wrap it after: DistributedDataParallel(amp.prepare(module))"
        )
    inner = getattr(model, "_orig_mod", None)
    target = inner if isinstance(inner, nn.Module) else model
    compiled = inner is not None or getattr(model, "_compiled_call_impl", None) is not None
    if compiled and _torch.ran_compiled(target):
        raise StateError(
            "prepare: this module has already run compiled, and hooks added now would be ignored; prepare the module "
            "first, then torch.compile it"
        )
    devices = {p.device.type for p in target.parameters()} - {"meta", device_type}
    if devices:
        raise StateError(
            f"prepare: this Amp is for {device_type!r}, but the model has parameters on {', '.join(sorted(devices))}; "
            f"move the model there first, or make the session with Amp(..., device={sorted(devices)[0]!r})"
        )
    return target


def check_optimizer(optimizer: Optimizer, model: nn.Module, known: bool) -> None:
    """See that an optimizer can be prepared with a model; one that is ``known`` already must update this one too.

    Raises:
        StateError: It cannot.
    """
    if not isinstance(optimizer, Optimizer):
        raise StateError(
            f"prepare: {type(optimizer).__name__} is not a torch.optim.Optimizer; create it before prepare"
        )
    if known:
        held = {id(masters.model_param_of(p)) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(parameter) in held for parameter in model.parameters()):
            raise StateError(
                f"prepare: this {type(optimizer).__name__} is already prepared, and holds no parameter of this "
                f"{type(model).__name__}; give each model with the optimizer that updates it"
            )


def check_parameters(model: nn.Module, plan: Plan) -> None:
    """Parameters stored low under a plan that stores them in fp32 cannot be what anyone wants.

    Raises:
        PlanError: There are such; names them.
    """
    if plan.params != "fp32":
        return
    low: dict[torch.dtype, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype in _LOW:
            low.setdefault(parameter.dtype, []).append(name)
    for dtype, names in low.items():
        short = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        instead = f"{short}-master" if dtype is torch.bfloat16 or plan.compute == "fp16" else "bf16-master"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise PlanError(
            f"prepare: the plan {plan} keeps parameters in fp32, but {', '.join(names[:3])}{more} are stored in "
            f"{short}: their updates and gradients would be {short}. Use the plan {instead!r} (fp32 masters in the "
            "optimizer), or call model.float() before the optimizer is made."
        )


def inference_dtypes(model: nn.Module, plan: Plan) -> dict[torch.Tensor, torch.dtype]:
    """Weights of layers whose operators a mixed plan computes low anyway."""
    layers = (
        nn.Linear,
        nn.Bilinear,
        nn.modules.conv._ConvNd,
        nn.MultiheadAttention,
        nn.RNNBase,
        nn.RNNCellBase,
    )
    if not plan.autocasts or plan.stores_low:
        return {}
    exempt = regions.assign(model, plan.regions)
    out: dict[torch.Tensor, torch.dtype] = {}
    shared: set[torch.Tensor] = set()
    for name, module in model.named_modules():
        for tensor in module.parameters(recurse=False):
            inside_region = any(name == path or name.startswith(path + ".") or not path for path in exempt)
            if isinstance(module, layers) and not inside_region and tensor.dtype is torch.float32:
                out[tensor] = plan.compute_dtype
            else:
                shared.add(tensor)
    return {tensor: dtype for tensor, dtype in out.items() if tensor not in shared}
