"""``colossalai.engine.schedule``: how a batch runs, in one process or through the stages of a pipeline."""

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
    """Reads batches, and records the local size of the last one."""

    batch_size = 0

    def load_batch(self, data_iter: Iterator[Any]) -> tuple[Any, Any]:
        """The next ``(inputs, targets)``, on this process's device."""
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
    """Call a function with values, unpacking tuples, lists and mappings into arguments."""
    given: dict[str, Any] = {}
    args: list[Any] = []
    for value in values:
        if isinstance(value, dict):
            given |= value
        else:
            args += value if isinstance(value, (tuple, list)) else (value,)
    return function(*args, **given)


def _loss(criterion: Callable[..., Any], output: Any, label: Any) -> Any:
    """Call a criterion with several outputs and several targets as separate arguments."""
    if isinstance(output, dict) and not isinstance(label, dict):
        return criterion(output, label)  # its targets have no names
    return _call(criterion, output, label)


class NonPipelineSchedule(_Loads):
    """Forward, loss, backward; ``data_process_func`` converts what the loader yields to ``(inputs, targets)``."""

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
        """Run a batch; returns ``(output, label, loss)``, with None for values that are not requested.

        The loss is computed whenever there is a backward, that is unless ``forward_only``.
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

    It supports every mode: the loss scale is applied in the schedule, and all stages step or skip together. Every stage
    reads the same loader; inputs are used on the first one, targets on the last.

    Args:
        num_microbatches: Number of parts into which a batch is split; it must divide the batch.
        kwargs: ``tensor_shape``, ``scatter_gather_tensors`` and other options of the original are ignored: torch infers
            shapes.
    """

    def __init__(self, num_microbatches: int, **kwargs: Any) -> None:
        self.num_microbatches = num_microbatches
        self.divide_by = 1
        self._schedule: Any = None

    def attach(self, model: nn.Module, criterion: Any, amp: Any, divide_by: int = 1) -> None:
        """Build torch's schedule for this rank's stages, and let it train by the plan.

        ``model``: a prepared stage, or an ``nn.ModuleList`` of several. ``divide_by``: number of batches per step.
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

        # torch would divide the gradients at the end, and those of earlier batches once more
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
        """Run a batch through all stages; all ranks of the pipeline call it together.

        Arguments and result are those of :meth:`NonPipelineSchedule.forward_backward_step`; on all stages except the
        last, output and loss are None.
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
    """The interleaved schedule: each rank runs several stages, the members of the attached ``nn.ModuleList``, in turn.

    ``num_microbatches`` is a multiple of the number of ranks.
    """

    def __init__(self, num_microbatches: int, num_model_chunks: int = 2, **kwargs: Any) -> None:
        super().__init__(num_microbatches, **kwargs)
