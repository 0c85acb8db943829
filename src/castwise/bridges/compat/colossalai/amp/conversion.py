"""``convert_to_amp``, which prepares a model, an optimizer and a criterion to train in one of three AMP modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from castwise import Amp
from castwise.bridges.compat.apex.amp.models import state_dict_in_fp32
from castwise.bridges.compat.colossalai.amp.amp_type import AMP_TYPE
from castwise.bridges.compat.colossalai.amp.optimizers import (
    AmpOptimizer,
    ApexAMPOptimizer,
    NaiveAMPOptimizer,
)
from castwise.bridges.compat.colossalai.context import ParallelMode
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.bridges.compat.colossalai.plans import Recipe, recipe_of

__all__ = [
    "AmpCriterion",
    "convert_to_amp",
    "convert_to_apex_amp",
    "convert_to_naive_amp",
    "convert_to_torch_amp",
    "prepare",
]


class AmpCriterion(nn.Module):
    """Wraps a criterion (any callable), which then runs under autocast, as in the torch mode and in Apex's ``O1``."""

    def __init__(self, loss: Any, amp: Amp) -> None:
        super().__init__()
        self.loss = loss
        self.amp = amp

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss."""
        with self.amp.autocast():
            return self.loss(*args, **kwargs)


def convert_to_amp(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Any,
    mode: AMP_TYPE,
    amp_config: Mapping[str, Any] | None = None,
) -> tuple[Any, Any, Any]:
    """Prepare a model, an optimizer and a criterion to train in one of Colossal-AI's AMP modes.

    The model is prepared in place. Call this function before DistributedDataParallel and before ``torch.compile``. If
    torch.distributed is initialised, all ranks must call it together.

    Args:
        model: The model, on its device. In a pipeline it may be an ``nn.ModuleList`` of several stages.
        optimizer: A torch optimizer that updates the model.
        criterion: A callable that computes a loss, or None.
        mode: ``AMP_TYPE.TORCH``, ``AMP_TYPE.APEX`` or ``AMP_TYPE.NAIVE``.
        amp_config: The options of the mode. docs/compat.md lists them.

    Returns:
        The tuple ``(model, optimizer, criterion)``. The optimizer is wrapped in an :class:`AmpOptimizer`, with the
        methods ``backward(loss)``, ``clip_grad_norm(model, max_norm)`` and ``step()``. Its attribute ``amp`` is the
        :class:`castwise.Amp`.

    Raises:
        PlanError: The mode does not exist, or the value of an option is not allowed.
        UnknownNameError: The mode has no option of a given name.
    """
    recipe = recipe_of(mode, amp_config)
    parameter = next(model.parameters(), None)
    amp = Amp(recipe.plan, device=None if parameter is None else parameter.device)
    return prepare(recipe, amp, model, optimizer, criterion)


def convert_to_torch_amp(
    model: nn.Module, optimizer: Optimizer, criterion: Any = None, amp_config: Any = None
) -> tuple[Any, Any, Any]:
    """Prepare a model, an optimizer and a criterion in the torch mode, as :func:`convert_to_amp` does."""
    return convert_to_amp(model, optimizer, criterion, AMP_TYPE.TORCH, amp_config)


def convert_to_apex_amp(model: nn.Module, optimizer: Optimizer, amp_config: Any = None) -> tuple[Any, Any]:
    """Prepare a model and an optimizer in the Apex mode, as :func:`convert_to_amp` does, and return both."""
    return convert_to_amp(model, optimizer, None, AMP_TYPE.APEX, amp_config)[:2]


def convert_to_naive_amp(model: nn.Module, optimizer: Optimizer, amp_config: Any = None) -> tuple[Any, Any]:
    """Prepare a model and an optimizer in the naive mode, as :func:`convert_to_amp` does, and return both."""
    return convert_to_amp(model, optimizer, None, AMP_TYPE.NAIVE, amp_config)[:2]


def prepare(
    recipe: Recipe,
    amp: Amp,
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Any,
    clip_grad_norm: float = 0.0,
) -> tuple[nn.Module, AmpOptimizer, Any]:
    """Prepare a model, an optimizer and a criterion with a castwise session that exists already.

    ``colossalai.initialize`` creates the session earlier than :func:`convert_to_amp`, because sharding needs it.
    """
    part = gpc.pipeline_parallel_size > 1
    for module in model if isinstance(model, nn.ModuleList) and part else [model]:
        amp.prepare(module, optimizer, part=part)
    _declare_cut(amp, model)
    if recipe.mode == "apex":
        for module in model.modules():
            module.register_state_dict_post_hook(state_dict_in_fp32)
    # Unscaling after each backward, as ApexAMPOptimizer does, needs all ranks at once; a pipeline's ranks are not.
    kinds: dict[str, type[AmpOptimizer]] = {
        "naive": NaiveAMPOptimizer,
        "apex": AmpOptimizer if part else ApexAMPOptimizer,
    }
    kind = kinds.get(recipe.mode, AmpOptimizer)
    if recipe.covers_loss and criterion is not None:
        criterion = AmpCriterion(criterion, amp)
    return model, kind(optimizer, amp, recipe, clip_grad_norm), criterion


def _declare_cut(amp: Amp, model: nn.Module) -> None:
    """Tell the castwise session which parameters Colossal-AI's tensor parallel layers have sharded.

    These layers mark such parameters with the attribute ``is_tensor_parallel``.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    group = gpc.get_group(ParallelMode.TENSOR) if gpc.is_initialized(ParallelMode.TENSOR) else None
    for parameter in model.parameters():
        if getattr(parameter, "is_tensor_parallel", False) and not hasattr(parameter, "device_mesh"):
            amp.mark_sharded(parameter, group)
