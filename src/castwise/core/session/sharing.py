"""Refuse a model that shares tensors or modules with a prepared one, if one of the two would change how the other runs.

Models of one :class:`~castwise.Amp` may share what its plan treats alike in both, since they are closed together, the last first.
Models of several may share what neither changes, since they are closed in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from castwise.core import masters
from castwise.core.model import borders
from castwise.core.model.resolve import Resolution, named_tensors
from castwise.core.model.stored import are_noted
from castwise.core.plans.text import some
from castwise.core.session.inventory import Inventory
from castwise.errors import StateError

_COPY = "Give one of them a copy: prepare(copy.deepcopy(model)); or close() the first"
_ONE = "Prepare both with one Amp, give one of them a copy, or close() the first"


def check_sharing(
    found: Inventory,
    resolution: Resolution,
    dtypes: Mapping[Tensor, torch.dtype],
    prepared: Iterable[tuple[nn.Module, str, bool]],
) -> None:
    """Raise if a model that is about to be prepared and a prepared one would change how the other runs.

    Args:
        found: The facts about the model.
        resolution: What the plan means for it.
        dtypes: The tensors whose dtype must change, with their new dtypes.
        prepared: Each prepared model, a description of the Amp that has prepared it, and whether that is the Amp that
            prepares now.

    Raises:
        StateError: They share tensors or modules that one of the plans changes.
    """
    if not are_noted(found.names.keys()):
        return
    names = {tensor: name for name, tensor in named_tensors(found.model)}
    for other, owner, same in prepared:
        shared = [tensor for _, tensor in named_tensors(other) if tensor in names]
        if not shared:
            continue
        why = _nested(found.model, other) or _formats(shared, names, resolution, dtypes, same)
        why = why or _borders(found.model, other, resolution, same)
        if why:
            some_names = some([names[tensor] for tensor in shared], 3)
            raise StateError(
                f"prepare: this {found.kind} shares {some_names} with a {type(other).__name__} that {owner} has prepared, and {why}."
            )


def _nested(model: nn.Module, other: nn.Module) -> str:
    nested = {model, other} <= {*model.modules()} or {model, other} <= {*other.modules()}
    return (
        "one is a part of the other, so a call would run under two plans. Prepare the whole alone (methods= names methods that you "
        "call beside forward), or close() the first"
    ) * nested


def _formats(
    shared: Iterable[Tensor],
    names: Mapping[Tensor, str],
    resolution: Resolution,
    dtypes: Mapping[Tensor, torch.dtype],
    same: bool,
) -> str:
    for tensor in shared:
        name, now = names[tensor], _short(tensor.dtype)
        changed = masters.former_dtype(tensor) is not tensor.dtype
        if tensor in dtypes:
            return f"needs {name} in {now}, which this plan stores in {_short(dtypes[tensor])}. {_COPY}"
        if changed and name in resolution.left_low:
            return f"stores {name} in {now}, which this plan keeps in fp32. {_COPY}"
        if changed and not same:
            return f"has stored {name} in {now}, which its close() will undo. {_ONE}"
    return ""


def _borders(model: nn.Module, other: nn.Module, resolution: Resolution, same: bool) -> str:
    theirs = set(other.modules())
    planned = {place.path: place for place in resolution.borders}
    for path, module in model.named_modules():
        if module not in theirs:
            continue
        border, place = borders.border_of(module), planned.get(path)
        if border is None and place is None:
            continue
        alike = border is not None and place is not None and borders.is_as_planned(border, resolution, place)
        if not same or not alike:
            if alike:
                return (
                    f"both cast at the entry of {path}, where close() of one would undo the other's. {_ONE}"
                )
            return f"the two plans do not cast alike at the entry of {path}. {_COPY}"
    return ""


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))
