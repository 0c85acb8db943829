"""The state of a model before any plan: which tensors are stored low or quantised, and which may be widened.

``transformers`` and others load a checkpoint in the format in which it was written. Frozen parameters that arrive low
are a *base*, as under LoRA: nothing updates them, so nothing is lost by leaving them as they are. Quantised weights
are meaningless without the code that reads them, and no plan touches them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.plans.formats import FORMATS, LOW, LOW_DTYPES
from castwise.core.plans.plan import PRESETS, Plan
from castwise.errors import PlanError

WIDEN = (False, True, "all")
"""Allowed for ``widen=``: nothing; trained parameters and the buffers in their modules; the frozen base too."""
_PLAIN = (torch.float32, torch.float64, *LOW_DTYPES)
"""Formats in which a weight is a plain number, not encoded."""
PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32)


def check_widen(call: str, widen: object) -> None:
    """Raise if ``widen=`` has an invalid value.

    Raises:
        PlanError: The value is not allowed; the message names the call, the value and the allowed values.
    """
    if not (isinstance(widen, bool) or widen == "all"):
        raise PlanError(
            f"{call}(widen={widen!r}) is not allowed. Allowed: False; True for trained parameters; 'all' for frozen parameters too."
        )


def is_sealed(tensor: Tensor) -> bool:
    """Whether a floating tensor holds encoded values, so that a cast would destroy them.

    Those are fp8 tensors, tensors with their own operators (torchao's), and frozen parameters of a class
    that is not torch's (bitsandbytes has some that report bf16 and hold packed bits).
    """
    if tensor.is_floating_point() and tensor.dtype not in _PLAIN:
        return True
    if hasattr(tensor, "device_mesh"):
        return is_sealed(_torch.distributed.local_tensor(tensor))
    if _torch.distributed.dispatches_itself(tensor):
        return True
    foreign = not type(tensor).__module__.startswith(("torch.", "castwise."))
    return foreign and isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def is_quantised(module: nn.Module) -> bool:
    """Whether a module's direct weights are quantised, so that its other tensors (scales, a bias) stay unchanged."""
    own = list(module.parameters(recurse=False))
    if any(is_sealed(p) or p.dtype in PACKED for p in own):
        return True
    packed = any(b.dtype in PACKED and b.dim() > 1 for b in module.buffers(recurse=False))
    return packed and not any(p.dim() > 1 for p in own)


def widening(model: nn.Module, widen: Any) -> Callable[[str, Tensor], bool]:
    """Whether a tensor that a plan does not store, given by the path of its module, is widened to fp32.

    Args:
        model: In any state.
        widen: One of :data:`WIDEN`.
    """
    modules = dict(model.named_modules())
    known: dict[str, bool] = {}

    def beside_base(path: str) -> bool:
        """Whether the nearest enclosing module with parameters has frozen low ones."""
        around = path  # no recursion: a function that refers to itself would keep the model until a garbage collection
        while around and not any(True for _ in modules[around].parameters()):
            around = around.rpartition(".")[0]
        if around not in known:
            known[around] = any(
                p.dtype in LOW_DTYPES and not p.requires_grad for p in modules[around].parameters()
            )
        return known[around]

    def wide(path: str, tensor: Tensor) -> bool:
        if not widen or tensor.dtype not in LOW_DTYPES:
            return False
        if widen == "all" or (isinstance(tensor, nn.Parameter) and tensor.requires_grad):
            return True
        return not isinstance(tensor, nn.Parameter) and not beside_base(path)

    return wide


def widen_for(plan: Plan, model: nn.Module) -> Any:
    """The ``widen`` argument for comparing a plan with fp32 on a model that may have low parameters.

    A plan that only computes in fp32 is fp32 for the whole model. Under other plans, trained parameters are widened,
    and so is a base in another low format than the plan's. A plan that computes in fp32 and returns outputs unchanged
    leaves a model with a low base as it is (:func:`as_given`).
    """
    if plan.stores_low:
        return False
    if plan.formats.isdisjoint(LOW):
        return "all" if plan.output == "fp32" else True
    other = (p for p in model.parameters() if p.dtype in LOW_DTYPES and p.dtype is not plan.compute_dtype)
    return "all" if any(not p.requires_grad for p in other) else True


def as_given(model: nn.Module) -> Plan | None:
    """The plan under which a model with low parameters runs as it does without a plan.

    None if it arrives in fp32, or if its trained parameters are stored in several formats.
    """
    low = low_tensors(model)
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if not low or len(trained) != 1:
        return None
    (dtype,) = trained
    if dtype is torch.float32:
        return Plan(compute="fp32", output="as_is")
    name = next((name for name in LOW if FORMATS[name].dtype is dtype), None)
    return None if name is None else dataclasses.replace(PRESETS[f"{name}-true"], output="as_is")


def widen_(model: nn.Module) -> dict[str, torch.dtype]:
    """Store all bf16 and fp16 tensors of a model without gradients in fp32, in place, except quantised ones.

    Returns:
        The former formats, by path, for :func:`store_`.
    """
    own = {name for path, m in model.named_modules() if is_quantised(m) for name in _names(path, m)}
    wide = {name: t for name, t in low_tensors(model).items() if name not in own and not is_sealed(t)}
    before = {name: tensor.dtype for name, tensor in wide.items()}
    store_(model, dict.fromkeys(wide, torch.float32))
    return before


def store_(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Store tensors of a model, by path, in other formats in place; their gradients are dropped."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if dtypes.get(name, tensor.dtype) is not tensor.dtype:
            tensor.grad = None
            tensor.data = tensor.data.to(dtypes[name])


def _names(path: str, module: nn.Module) -> Iterator[str]:
    both = (*module.named_parameters(path, recurse=False), *module.named_buffers(path, recurse=False))
    yield from (name for name, _ in both)


def low_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model that are stored in bf16 or fp16, each once, by path."""
    both = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in both if tensor.dtype in LOW_DTYPES}


def more_bytes(tensors: Iterable[Tensor]) -> int:
    """Additional bytes for storing low tensors in fp32, on this rank."""
    return sum(_local(t).numel() * (torch.float32.itemsize - t.dtype.itemsize) for t in tensors)


def _local(tensor: Tensor) -> Tensor:
    return _torch.distributed.local_tensor(tensor) if hasattr(tensor, "device_mesh") else tensor
