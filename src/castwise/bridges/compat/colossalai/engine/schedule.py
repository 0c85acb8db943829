"""``colossalai.engine.schedule``: classes that run a batch forward and backward, with or without pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from castwise.bridges.compat.colossalai.context import ParallelMode
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.bridges.compat.colossalai.utils import get_current_device
from castwise.bridges.compat.coverage import missing_attribute
from castwise.errors import PlanError, StateError

__all__ = ["InterleavedPipelineSchedule", "NonPipelineSchedule", "PipelineSchedule"]
__getattr__ = missing_attribute("colossalai.engine.schedule")


class _Loads:
    """Reads batches, and keeps the size of the last batch on this rank."""

    batch_size = 0

    def load_batch(self, data_iter: Iterator[Any]) -> tuple[Any, Any]:
        """Return the next ``(inputs, targets)`` of an iterator, moved to this process's device."""
        batch = next(data_iter)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise PlanError(
                f"engine.execute_schedule: the loader gave a {type(batch).__name__}; allowed: pairs (inputs, targets). Give "
                "the schedule a data_process_func, or call engine(...) and engine.backward(loss) yourself."
            )
        data, label = (_to_device(part) for part in batch)
        first = data[0] if isinstance(data, (tuple, list)) else data
        first = next(iter(first.values())) if isinstance(first, dict) else first
        self.batch_size = int(first.shape[0]) if isinstance(first, Tensor) and first.dim() else 1
        return data, label


def _to_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(get_current_device(), non_blocking=True)
    if isinstance(value, (tuple, list)):
        return type(value)(_to_device(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_device(item) for key, item in value.items()}
    return value


def _call(function: Callable[..., Any], *values: Any) -> Any:
    """Call a function with values. Tuples and lists are unpacked into positional arguments, dicts into keyword arguments."""
    given: dict[str, Any] = {}
    args: list[Any] = []
    for value in values:
        if isinstance(value, dict):
            given |= value
        else:
            args += value if isinstance(value, (tuple, list)) else (value,)
    return function(*args, **given)


def _loss(criterion: Callable[..., Any], output: Any, label: Any) -> Any:
    """Call a criterion with outputs and targets. Several outputs or targets become separate arguments."""
    if isinstance(output, dict) and not isinstance(label, dict):
        return criterion(output, label)  # outputs have names, targets have none: not unpacked
    return _call(criterion, output, label)


class NonPipelineSchedule(_Loads):
    """Runs forward, loss and backward of a batch in one process.

    ``data_process_func``, if given, converts what the data loader yields to ``(inputs, targets)``.
    """

    def __init__(self, data_process_func: Callable[[Any], tuple[Any, Any]] | None = None) -> None:
        self.data_process_func = data_process_func

    def forward_backward_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Any]:
        """Run the next batch, and return ``(output, label, loss)``, with None for values that are not requested.

        Unless ``forward_only``, the loss is computed even if it is not requested, since backward needs it.
        """
        if self.data_process_func is not None:
            data_iter = iter([self.data_process_func(next(data_iter))])
        data, label = self.load_batch(data_iter)
        output = _call(engine, data)
        loss = None
        if return_loss or not forward_only:
            loss = _loss(engine.criterion, output, label)
        if loss is not None and not forward_only:
            engine.backward(loss)
        loss = loss.detach() if return_loss and loss is not None else None
        return (output, label, loss) if return_output_label else (None, None, loss)


class PipelineSchedule(_Loads):
    """The one-forward-one-backward (1F1B) schedule of ``torch.distributed.pipelining``.

    It works in every AMP mode. The loss scale is applied in the schedule, and all stages step or skip together. Every stage
    reads the same data loader; the first stage uses the inputs and the last stage uses the targets.

    Args:
        num_microbatches: Number of parts into which a batch is split; it must divide the batch.
        kwargs: Colossal-AI's other options, such as ``tensor_shape`` and ``scatter_gather_tensors``. They are ignored, since
            torch infers shapes.
    """

    def __init__(self, num_microbatches: int, **kwargs: Any) -> None:
        self.num_microbatches = num_microbatches
        self.divide_by = 1
        self._schedule: Any = None

    def attach(self, model: nn.Module, criterion: Any, amp: Any, divide_by: int = 1) -> None:
        """Build torch's pipeline schedule for this rank's stages.

        Args:
            model: A stage that the session has prepared, or an ``nn.ModuleList`` of several such stages.
            criterion: Computes the loss from outputs and targets.
            amp: The castwise session, whose loss scale the schedule applies.
            divide_by: The number of batches per optimizer step.
        """
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        if criterion is None:
            raise StateError("initialize: a pipeline needs a criterion; its schedule computes the loss")
        self.divide_by = divide_by
        group = gpc.get_group(ParallelMode.PIPELINE)
        ranks, rank = gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE)
        modules = list(model) if isinstance(model, nn.ModuleList) else [model]
        device = get_current_device()
        stages = [
            PipelineStage(module, rank + chunk * ranks, ranks * len(modules), device, group=group)
            for chunk, module in enumerate(modules)
        ]

        parts = self.num_microbatches * divide_by

        def loss_fn(output: Any, target: Any) -> Tensor:
            loss: Tensor = _loss(criterion, output, target)
            return loss / parts

        # torch's scale_grads divides gradients after each batch, and so would divide those of earlier batches again
        options: dict[str, Any] = {"loss_fn": loss_fn, "scale_grads": False}
        if len(stages) == 1:
            schedule: Any = Schedule1F1B(stages[0], self.num_microbatches, **options)
        else:
            schedule = ScheduleInterleaved1F1B(list(stages), self.num_microbatches, **options)
        self._schedule = amp.pipeline(schedule)

    def forward_backward_step(
        self,
        engine: Any,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Any]:
        """Run the next batch through all stages. All ranks of the pipeline must make this call together.

        The arguments and the result are those of :meth:`NonPipelineSchedule.forward_backward_step`. On every stage except
        the last, the output and the loss are None.
        """
        data, label = self.load_batch(data_iter)
        first, last = gpc.is_pipeline_first_stage(), gpc.is_pipeline_last_stage()
        losses: list[Tensor] = []
        args = (data if isinstance(data, (tuple, list)) else (data,)) if first else ()
        given = {"target": label, "losses": losses} if last else {}
        if forward_only:
            with torch.no_grad():
                output = self._schedule.eval(*args, **given)
        else:
            output = self._schedule.step(*args, **given)
            count = getattr(engine.optimizer, "count", None)
            if count is not None:
                count()
        loss = None
        if last and return_loss and losses:
            loss = torch.stack([part.detach().float() for part in losses]).sum() * self.divide_by
        return (output if last else None, label, loss) if return_output_label else (None, None, loss)


class InterleavedPipelineSchedule(PipelineSchedule):
    """The interleaved 1F1B schedule, in which each rank runs several stages.

    The stages of a rank are the members of the ``nn.ModuleList`` that is given to :meth:`attach`. ``num_microbatches`` must be
    a multiple of the number of ranks.
    """

    def __init__(self, num_microbatches: int, num_model_chunks: int = 2, **kwargs: Any) -> None:
        super().__init__(num_microbatches, **kwargs)
