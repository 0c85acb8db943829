"""``colossalai.engine``: the class ``Engine``, which holds a model, its optimizer and its criterion."""

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
    """Holds a model, its optimizer and its criterion, and has the methods that a training loop calls.

    :func:`colossalai.initialize` creates the engine. A training loop uses it as follows::

        engine.zero_grad()
        output = engine(inputs)
        loss = engine.criterion(output, targets)
        engine.backward(loss)
        engine.step()

    Args:
        model: The model that ``convert_to_amp`` prepared, which may be wrapped in DistributedDataParallel.
        optimizer: The optimizer wrapper that ``convert_to_amp`` returned, or a wrapper around it.
        criterion: A callable that computes the loss from outputs and targets.
        gradient_handlers: Objects that average gradients over data parallel ranks before each step.
        clip_grad_norm: The global norm to which gradients are clipped, or 0 for no clipping.
        verbose: Accepted and ignored.
        schedule: The object that runs the forward and backward pass of a batch in :meth:`execute_schedule`.
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
        """The :class:`castwise.Amp` of the optimizer, for features that Colossal-AI does not have."""
        session: Amp = self.optimizer.amp
        return session

    @property
    def uses_pipeline(self) -> bool:
        """Whether the model is a stage of a pipeline."""
        return isinstance(self.schedule, PipelineSchedule)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs."""
        return self.model(*args, **kwargs)

    def train(self) -> None:
        """Set the model to training mode."""
        self.training = True
        self.model.train()

    def eval(self) -> None:
        """Set the model to evaluation mode."""
        self.training = False
        self.model.eval()

    def zero_grad(self) -> None:
        """Clear the gradients. If gradients are accumulated, they are cleared only before the first batch of a step."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to ``.grad``. They are multiplied by the loss scale, except in the Apex mode."""
        self.optimizer.backward(loss)

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Run the backward pass from a tensor whose gradient is known, as the stages of a pipeline do.

        Args:
            tensor: An output of the model or of a stage.
            grad: The gradient of the loss with respect to ``tensor``. It must be multiplied by the loss scale already,
                except in the Apex mode.
        """
        self.optimizer.backward_by_grad(tensor, grad)

    def step(self) -> Any:
        """Average gradients over data parallel ranks, clip them, and make an optimizer step.

        The step is skipped if a gradient is infinite or NaN.

        Returns:
            The return value of the optimizer's ``step``. In the naive mode, that is ``(True, grad_norm)`` or, if the
            step was skipped, ``(False, None)``. In the other modes it is None.
        """
        for handler in self._handlers:
            handler.handle_gradient()
        self.optimizer.clip_grad_norm(self.model, self._clip_grad_norm)
        return self.optimizer.step()

    def execute_schedule(self, data_iter: Iterator[Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        """Run the forward pass and the backward pass of the next batch.

        Args:
            data_iter: An iterator whose items are pairs ``(inputs, targets)``.
            kwargs: The options ``forward_only``, which leaves out the backward pass, ``return_loss`` and
                ``return_output_label``.

        Returns:
            The tuple ``(output, label, loss)``. A value is None if it was not requested or if only another stage of the
            pipeline has it.
        """
        return self.schedule.forward_backward_step(self, data_iter, **kwargs)
