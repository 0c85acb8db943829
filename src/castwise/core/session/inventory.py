"""Read facts about a model and its optimizers once, before ``prepare`` raises errors or changes anything."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core import _torch, masters
from castwise.core.model.arrival import low_tensors
from castwise.core.parallel import wrappers


@dataclass(frozen=True)
class Holding:
    """Facts about an optimizer, read once."""

    optimizer: Optimizer
    kind: str
    """The name of the optimizer's class."""
    params: frozenset[int]
    """The ``id`` of each parameter that it updates. For an fp32 master, it is the ``id`` of the model's own parameter."""
    takes_hooks: bool
    is_zero: bool
    """Whether it is torch's ZeroRedundancyOptimizer."""
    has_masters: bool

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self:
        """Read the facts about an optimizer."""
        params = frozenset(
            id(masters.model_param_of(parameter))
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        return cls(
            optimizer,
            type(optimizer).__name__,
            params,
            _torch.optimizers.has_step_hooks(optimizer),
            _torch.distributed.is_zero(optimizer),
            masters.attachment_of(optimizer) is not None,
        )


@dataclass(frozen=True)
class Inventory:
    """Facts about a model and its optimizers, read once."""

    model: nn.Module
    """The model, without a wrapper of ``torch.compile``."""
    kind: str
    """The name of the model's class."""
    names: Mapping[int, str]
    """The names of its parameters, each once, by ``id``."""
    without_shape: Sequence[str]
    """The names of parameters that have no shape yet, because they belong to lazy modules that have not run."""
    device_types: frozenset[str]
    low: Mapping[str, Tensor]
    """The parameters and buffers that are stored in bf16 or fp16, each once, by name."""
    with_masters: Sequence[str]
    """The names of parameters that already have an fp32 master."""
    steps_in_backward: Sequence[Any]
    """Optimizers that update weights during the backward pass (LOMO), given or found by their hooks on gradients."""
    is_wrapped: bool
    """Whether the model itself is a DistributedDataParallel or DataParallel."""
    is_in_ddp: bool
    is_in_fsdp1: bool
    is_compiled: bool
    ran_compiled: bool
    holdings: Sequence[Holding]

    @classmethod
    def of(cls, given: nn.Module, optimizers: Sequence[Optimizer] = ()) -> Self:
        """Read the facts about a model, wrapped or not, and about its optimizers."""
        model = _torch.calls.without_compiler(given)
        params = dict(model.named_parameters())
        hooks = (hook for p in params.values() for hook in _torch.hooks.gradient_hooks(p))
        return cls(
            model=model,
            kind=type(model).__name__,
            names={id(parameter): name for name, parameter in params.items()},
            without_shape=[name for name, p in params.items() if nn.parameter.is_lazy(p)],
            device_types=frozenset(parameter.device.type for parameter in params.values()),
            low=low_tensors(model),
            with_masters=[name for name, p in params.items() if masters.master_of(p) is not None],
            steps_in_backward=[
                *(each for each in optimizers if hasattr(each, "fused_backward")),
                *(each for hook in hooks for each in _fused_within(hook)),
            ],
            is_wrapped=isinstance(given, (nn.parallel.DistributedDataParallel, nn.DataParallel)),
            is_in_ddp=wrappers.ddp_around(given) is not None,
            is_in_fsdp1=_torch.distributed.has_fsdp1(given),
            is_compiled=any(map(_torch.dynamo.is_compiled, (given, model))),
            ran_compiled=_torch.dynamo.ran_compiled(model),
            holdings=list(map(Holding.of, optimizers)),
        )


def _fused_within(function: Any, depth: int = 3) -> list[Any]:
    """Return the optimizers with a method ``fused_backward`` to which a hook refers."""
    cells = [getattr(function, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            cells.append(cell.cell_contents)
    found = [each for each in cells if isinstance(each, Optimizer) and hasattr(each, "fused_backward")]
    return found or [
        other for each in cells if depth and callable(each) for other in _fused_within(each, depth - 1)
    ]
