"""Losses inside pipeline schedules.

A schedule of ``torch.distributed.pipelining`` runs backward itself, microbatch by microbatch, from the result of
its loss function. So the scale is applied there, in backward only: the schedule still reports the unscaled
loss, and its backward starts from the scale. If the schedule would divide gradients by the number of
microbatches at the end, that factor is applied there too: scaled fp16 gradients would overflow before.
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
    """The loss unchanged; its gradient multiplied by a scale, in fp32."""

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
    """The stages that this rank runs.

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
    """Scale the losses of a schedule in backward, and open a step's window at its first forward.

    Args:
        schedule: Made with a ``loss_fn``; a schedule without a ``loss_fn`` only runs forward.
        scale: The scale as a 0-dim fp32 tensor; None if the plan has none.
        open_window: Called before each forward of a stage on this rank, the first action of every rank.
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
