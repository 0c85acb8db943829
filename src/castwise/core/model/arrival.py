"""Inspect a model before a plan is applied: find tensors stored in bf16 or fp16, and quantised ones, and widen them to fp32.

``transformers`` and other libraries load a checkpoint in the format in which it was written, so the parameters of a
model may be bf16 or fp16 from the start. Such parameters, if they are frozen, are called the *base*, as under LoRA.
Nothing updates the base, so nothing is lost by leaving it in bf16 or fp16. Quantised weights are meaningless without
the code that reads them, and no plan changes them.
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
"""The values allowed for ``widen=``, which says which bf16 and fp16 tensors are stored in fp32.

False stores none of them in fp32. True stores trained parameters in fp32, and buffers of modules that have no frozen
bf16 or fp16 parameters. ``"all"`` stores frozen parameters and all buffers in fp32 too.
"""
_PLAIN = (torch.float32, torch.float64, *LOW_DTYPES)
"""Dtypes in which an element of a weight is the number itself, and not a code for it."""
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

    This holds for fp8 tensors, and for tensor subclasses that implement their own operators, such as torchao's. It also
    holds for frozen parameters of a class from another library: bitsandbytes has parameters that report bf16 and hold
    packed bits.
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
    """Whether the weights that a module itself holds are quantised.

    The other tensors of such a module, for example scales and a bias, must then stay unchanged as well.
    """
    own = list(module.parameters(recurse=False))
    if any(is_sealed(p) or p.dtype in PACKED for p in own):
        return True
    packed = any(b.dtype in PACKED and b.dim() > 1 for b in module.buffers(recurse=False))
    return packed and not any(p.dim() > 1 for p in own)


def widening(model: nn.Module, widen: Any) -> Callable[[str, Tensor], bool]:
    """Return a function that decides whether a bf16 or fp16 tensor of a model is to be stored in fp32.

    The function takes the path of a module and a tensor of that module. It is meant for tensors whose storage format
    the plan leaves open.

    Args:
        model: The model, prepared or not.
        widen: One of :data:`WIDEN`.
    """
    modules = dict(model.named_modules())
    known: dict[str, bool] = {}

    def beside_base(path: str) -> bool:
        """Whether the nearest module at or above ``path`` that has parameters has frozen ones in bf16 or fp16."""
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


def widen_for(plan: Plan, model: nn.Module, *, serves: bool = False) -> Any:
    """Return the value of ``widen=`` with which a plan is compared with fp32 on a model.

    The model may have parameters in bf16 or fp16. There are four cases:

    - A plan that stores parameters in bf16 or fp16 widens nothing.
    - A plan that computes only in fp32 and returns fp32 widens all parameters, frozen ones too.
    - A plan that computes only in fp32 and returns outputs unchanged, such as the one from :func:`as_given`, widens
      only trained parameters.
    - Other plans widen trained parameters. They widen frozen parameters too if some are stored in the low format that
      is not the plan's (bf16 under an fp16 plan, fp16 under a bf16 plan).

    A model that is served has no trained parameters. There a plan widens everything, but the first and third widen nothing.
    """
    if plan.stores_low:
        return False
    if serves:
        return False if plan.formats.isdisjoint(LOW) and plan.output == "as_is" else "all"
    if plan.formats.isdisjoint(LOW):
        return "all" if plan.output == "fp32" else True
    other = (p for p in model.parameters() if p.dtype in LOW_DTYPES and p.dtype is not plan.compute_dtype)
    return "all" if any(not p.requires_grad for p in other) else True


def as_given(model: nn.Module) -> Plan | None:
    """Return the plan under which a model with bf16 or fp16 parameters runs as it does without a plan.

    Return None if the model has no bf16 or fp16 tensor, or if its trained parameters (if none is trained, all) are stored in
    several formats.
    """
    low = low_tensors(model)
    trained = {p.dtype for p in model.parameters() if p.requires_grad} or {
        p.dtype for p in model.parameters()
    }
    if not low or len(trained) != 1:
        return None
    (dtype,) = trained
    if dtype is torch.float32:
        return Plan(compute="fp32", output="as_is")
    name = next((name for name in LOW if FORMATS[name].dtype is dtype), None)
    return None if name is None else dataclasses.replace(PRESETS[f"{name}-true"], output="as_is")


def widen_(model: nn.Module) -> dict[str, torch.dtype]:
    """Store the bf16 and fp16 parameters and buffers of a model in fp32, in place, except quantised ones.

    Their gradients are dropped.

    Returns:
        The former dtypes, by path, with which :func:`store_` can undo this.
    """
    own = {name for path, m in model.named_modules() if is_quantised(m) for name in _names(path, m)}
    wide = {name: t for name, t in low_tensors(model).items() if name not in own and not is_sealed(t)}
    before = {name: tensor.dtype for name, tensor in wide.items()}
    store_(model, dict.fromkeys(wide, torch.float32))
    return before


def store_(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Store parameters and buffers of a model in other dtypes, in place, and drop their gradients.

    ``dtypes`` maps the path of a tensor to its new dtype.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if dtypes.get(name, tensor.dtype) is not tensor.dtype:
            tensor.grad = None
            _torch.tensors.assign(tensor, tensor.data.to(dtypes[name]))


def _names(path: str, module: nn.Module) -> Iterator[str]:
    both = (*module.named_parameters(path, recurse=False), *module.named_buffers(path, recurse=False))
    yield from (name for name, _ in both)


def low_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model that are stored in bf16 or fp16, each once, by path."""
    both = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in both if tensor.dtype in LOW_DTYPES}


def more_bytes(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes more bf16 or fp16 tensors would take on this rank if they were stored in fp32."""
    return sum(_local(t).numel() * (torch.float32.itemsize - t.dtype.itemsize) for t in tensors)


def _local(tensor: Tensor) -> Tensor:
    return _torch.distributed.local_tensor(tensor) if hasattr(tensor, "device_mesh") else tensor
