"""Scale the losses inside pipeline schedules.

A schedule of ``torch.distributed.pipelining`` runs the backward pass itself, microbatch by microbatch, from the result
of its loss function. So the loss function is wrapped so that the loss scale multiplies only the loss's gradient. The
schedule still reports the unscaled loss. Some schedules divide the gradients by the number of microbatches at the end.
This division is moved to the loss's gradient too, since the sum of scaled fp16 gradients would overflow before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.plans.formats import LOW_DTYPES
from castwise.errors import StateError


class _ScaledBackward(torch.autograd.Function):
    """Returns a loss unchanged in forward, and multiplies its gradient by the loss scale in backward.

    A bf16 or fp16 loss is returned in fp32.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype = loss.dtype
        return loss.float() if loss.dtype in LOW_DTYPES else loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return (grads[0] * scale.to(grads[0].device)).to(ctx.dtype), None


def stages_of(schedule: Any) -> list[Any]:
    """Return the stages of a pipeline schedule that this rank runs.

    Raises:
        StateError: The object is not a schedule of ``torch.distributed.pipelining``.
    """
    try:
        return _torch.distributed.schedule_stages(schedule)
    except AttributeError:
        raise StateError(
            f"pipeline({type(schedule).__name__}): not a schedule of torch.distributed.pipelining; make it first, e.g. "
            "Schedule1F1B(PipelineStage(...), n_microbatches, loss_fn=...)"
        ) from None


def adapt(schedule: Any, scale: Callable[[], Tensor | None], open_window: Callable[[], None]) -> None:
    """Make a pipeline schedule multiply the gradients of its losses by the loss scale.

    Args:
        schedule: The schedule. If it was made without a ``loss_fn``, it only runs forward.
        scale: A function that returns the loss scale as a 0-dim fp32 tensor, or None if the plan has none.
        open_window: A function to call before each forward of a stage on this rank. A forward is the first thing that
            every rank does in a step, so the call marks the start of the step.
    """

    def wrap(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(loss_fn)
        def in_backward(*args: Any, **kwargs: Any) -> Tensor:
            loss = loss_fn(*args, **kwargs)
            factor = scale()
            if parts > 1:
                factor = torch.full((), 1.0 / parts, device=loss.device) if factor is None else factor / parts
            return loss if factor is None else _ScaledBackward.apply(loss, factor)  # type: ignore[no-untyped-call]

        return in_backward

    def before(module: nn.Module, args: Any) -> None:
        open_window()

    if getattr(schedule, "_castwise_adapted", False):
        raise StateError("pipeline: this schedule has been given to pipeline() already")
    parts = _torch.distributed.take_gradient_division(schedule)
    _torch.distributed.replace_schedule_loss(schedule, wrap)
    for stage in stages_of(schedule):
        _torch.hooks.hook_first(stage.submod, before)
    schedule._castwise_adapted = True
