"""Return a plain module whose weights are stored as a plan stores them for inference."""

from __future__ import annotations

import os

import torch
from torch import nn

from castwise.core import _torch
from castwise.core.model.copying import copy_of
from castwise.core.model.resolve import named_tensors
from castwise.core.plans.plan import Plan, as_plan
from castwise.core.plans.text import some
from castwise.core.serve.plain import check, copied_under, of_the_model, stored_tensors
from castwise.core.session import Amp
from castwise.errors import PlanError


def bake(model: nn.Module, plan: Plan | str | os.PathLike[str] | torch.dtype) -> nn.Module:
    """Return a copy of a model with its weights stored as a plan stores them for inference, without anything of castwise in it.

    It is a plain module of the same class: it can be pickled, and loaded where castwise is not installed. A plain module casts
    nothing, so the caller does: under a plan that autocasts, call it inside of ``torch.autocast`` of the plan's format; under a plan
    that stores everything low, give it inputs in that format. Outputs are then those of the prepared model before it widens them.

    Args:
        model: The model, in evaluation mode, on its device, not prepared. It stays as it is.
        plan: The plan, in any form that :class:`castwise.Amp` accepts. Its compiler, optimizer, loss scale and process-wide settings
            are no part of the result.

    Raises:
        StateError: The model is in training mode or prepared.
        PlanError: The plan needs casts inside of the model, for regions or operator rules of its own. Use :func:`export`.
        PatternError, DeviceError: The plan does not fit the model or its device.

    Example::

        plain = castwise.bake(model, "bf16-mixed")
        torch.save(plain, "model.pt")
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
            outputs = plain(inputs)
    """
    check("bake", model)
    chosen = of_the_model(as_plan(plan), "bake")
    baked = copy_of(model)
    with copied_under(model, chosen) as copied:
        amp = Amp.of(copied)
        assert amp is not None
        places = [place.path for place in amp.resolve(copied, inference=True).borders if place.path]
        needs = [
            *([f"fp32 or other formats at {some(places)}"] if places else []),
            *([f"rules={chosen.rules!r}"] if chosen.rules != "native" and chosen.autocasts else []),
            *([f"rules for {some([op for op, _ in chosen.ops])}"] if chosen.ops else []),
        ]
        if needs:
            raise PlanError(
                f"bake: the plan {as_plan(plan)} has {' and '.join(needs)}, which need casts inside of the model, and a plain module "
                "has none; use castwise.export(model, plan, example), whose graph holds the casts, or a plan without them"
            )
        stored = stored_tensors(copied)
    for name, tensor in named_tensors(baked):
        _torch.tensors.assign(tensor, stored[name].data)
    return baked
