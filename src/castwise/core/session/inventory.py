"""Facts about a model and its optimizers, which ``prepare`` reads once before it refuses or changes anything."""

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
    """An optimizer and its parameters."""

    optimizer: Optimizer
    kind: str
    """Its class name."""
    params: frozenset[int]
    """The parameters that it updates, by ``id``: those behind masters if it has some."""
    takes_hooks: bool
    is_zero: bool
    """Whether it is torch's ZeroRedundancyOptimizer."""
    has_masters: bool

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self:
        """Read an optimizer."""
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
    """A model, read once."""

    model: nn.Module
    """The module inside a ``torch.compile`` wrapper."""
    kind: str
    """Its class name."""
    names: Mapping[int, str]
    """Its parameters, each once, by ``id``."""
    without_shape: Sequence[str]
    """Parameters of lazy modules that have not run."""
    device_types: frozenset[str]
    low: Mapping[str, Tensor]
    """Parameters and buffers that are stored in bf16 or fp16, each once."""
    with_masters: Sequence[str]
    """Parameters that already have an fp32 master."""
    steps_in_backward: Sequence[Any]
    """The optimizer that updates weights during backward (LOMO): found by its hooks on their gradients, or given."""
    is_wrapped: bool
    """Whether the model itself is a DistributedDataParallel or DataParallel."""
    is_in_ddp: bool
    is_in_fsdp1: bool
    is_compiled: bool
    ran_compiled: bool
    holdings: Sequence[Holding]

    @classmethod
    def of(cls, given: nn.Module, optimizers: Sequence[Optimizer] = ()) -> Self:
        """Read a model, as the user has it, and optimizers."""
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
    """Optimizers with a ``fused_backward`` that a hook refers to."""
    cells = [getattr(function, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            cells.append(cell.cell_contents)
    found = [each for each in cells if isinstance(each, Optimizer) and hasattr(each, "fused_backward")]
    return found or [
        other for each in cells if depth and callable(each) for other in _fused_within(each, depth - 1)
    ]
