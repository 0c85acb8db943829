"""``colossalai.engine``: a model, its optimizer and its criterion behind one object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from castwise import Amp
from castwise.bridges.compat.colossalai.engine.gradient_handler import DataParallelGradientHandler
from castwise.bridges.compat.colossalai.engine.schedule import NonPipelineSchedule, PipelineSchedule
from castwise.bridges.compat.coverage import missing_attribute

__all__ = ["DataParallelGradientHandler", "Engine", "NonPipelineSchedule", "PipelineSchedule"]
__getattr__ = missing_attribute("colossalai.engine")


class Engine:
    """A model, its optimizer and its criterion in one object for a training loop.

        engine.zero_grad()
        output = engine(inputs)
        loss = engine.criterion(output, targets)
        engine.backward(loss)
        engine.step()

    Args:
        model: The prepared model, in DistributedDataParallel if that averages its gradients.
        optimizer: The wrapper that ``convert_to_amp`` returns, or a wrapper around it.
        criterion: The loss.
        gradient_handlers: Called before each step to average gradients over data parallel ranks.
        clip_grad_norm: Largest global norm of the gradients; 0 for no clipping.
        verbose: Accepted for compatibility.
        schedule: How :meth:`execute_schedule` runs a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        criterion: Any = None,
        gradient_handlers: list[Any] | None = None,
        clip_grad_norm: float = 0.0,
        verbose: bool = True,
        schedule: NonPipelineSchedule | PipelineSchedule | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.criterion = criterion
        self.schedule = NonPipelineSchedule() if schedule is None else schedule
        self.training = True
        self._handlers = list(gradient_handlers or ())
        self._clip_grad_norm = clip_grad_norm

    @property
    def amp(self) -> Amp:
        """The castwise session, for features beyond Colossal-AI."""
        session: Amp = self.optimizer.amp
        return session

    @property
    def uses_pipeline(self) -> bool:
        """Whether the model is one stage of several."""
        return isinstance(self.schedule, PipelineSchedule)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        return self.model(*args, **kwargs)

    def train(self) -> None:
        """Set the model to training."""
        self.training = True
        self.model.train()

    def eval(self) -> None:
        """Set the model to evaluation."""
        self.training = False
        self.model.eval()

    def zero_grad(self) -> None:
        """Clear gradients; under accumulation only before the first of N batches."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add gradients of a loss: scaled ones, except in the Apex mode."""
        self.optimizer.backward(loss)

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Add gradients of an output whose own gradient is given: already scaled, except in the Apex mode."""
        self.optimizer.backward_by_grad(tensor, grad)

    def step(self) -> Any:
        """Average gradients over data parallel ranks, clip, then step or skip.

        Returns:
            The result of the optimizer's ``step``: ``(True, grad_norm)`` or ``(False, None)`` in the naive mode, else
            None.
        """
        for handler in self._handlers:
            handler.handle_gradient()
        self.optimizer.clip_grad_norm(self.model, self._clip_grad_norm)
        return self.optimizer.step()

    def execute_schedule(self, data_iter: Iterator[Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        """Run forward, and backward unless ``forward_only``, on a batch ``(inputs, targets)`` that ``data_iter`` yields.

        Returns:
            ``(output, label, loss)``; values that ``return_loss`` and ``return_output_label`` do not request, or that
            belong to other stages, are None.
        """
        return self.schedule.forward_backward_step(self, data_iter, **kwargs)
