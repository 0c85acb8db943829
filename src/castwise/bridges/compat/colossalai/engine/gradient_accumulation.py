"""Implements the option ``gradient_accumulation = N``: the optimizer steps once in N batches.

The classes of this module call N ``accumulate_size``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from castwise.bridges.compat.colossalai.nn.optimizer import ColossalaiOptimizer
from castwise.errors import PlanError

__all__ = [
    "GradAccumDataloader",
    "GradAccumGradientHandler",
    "GradAccumLrSchedulerByStep",
    "GradAccumOptimizer",
    "accumulate_gradient",
]


class GradAccumOptimizer(ColossalaiOptimizer):
    """Wraps an optimizer: divides losses by N, and clips, steps and clears gradients once in N batches.

    N is ``accumulate_size``. If the model is in DistributedDataParallel, ranks exchange gradients only in the last of N
    batches.
    """

    def __init__(self, optim: Any, accumulate_size: int, model: nn.Module | None = None) -> None:
        super().__init__(optim)
        if isinstance(accumulate_size, bool) or not isinstance(accumulate_size, int) or accumulate_size < 1:
            raise PlanError(
                f"gradient_accumulation={accumulate_size!r} is not allowed. Allowed: a whole number of batches >= 1."
            )
        self.accumulate_size = accumulate_size
        self.accumulate_step = 0
        self._ddp = model if isinstance(model, DistributedDataParallel) else None

    @property
    def is_full(self) -> bool:
        """Whether N batches have been accumulated, so that :meth:`step` will step the optimizer."""
        return self.accumulate_step >= self.accumulate_size

    def count(self) -> None:
        """Count a batch whose gradients have been added."""
        self.accumulate_step += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients before the first of N batches. Before the other batches, do nothing."""
        if self.accumulate_step == 0:
            self.optim.zero_grad(set_to_none)

    def _alone(self) -> Any:
        return contextlib.nullcontext() if self._ddp is None or self.is_full else self._ddp.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss divided by N, and add them to ``.grad``."""
        self.count()
        with self._alone():
            self.optim.backward(loss / self.accumulate_size)  # type: ignore[attr-defined]

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Run backward from a tensor, given the gradient of the loss with respect to that tensor, already divided by N."""
        self.count()
        with self._alone():
            self.optim.backward_by_grad(tensor, grad)  # type: ignore[attr-defined]

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> None:
        """Clip the gradients after the last of N batches. After the other batches, do nothing."""
        if self.is_full:
            self.optim.clip_grad_norm(model, max_norm)  # type: ignore[attr-defined]

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer after the last of N batches. After the other batches, do nothing and return None."""
        if not self.is_full:
            return None
        self.accumulate_step = 0
        return super().step(closure)


class GradAccumDataloader:
    """Wraps a data loader that has a length, and leaves out its last batches if fewer than N remain for a step."""

    def __init__(self, dataloader: Any, accumulate_size: int) -> None:
        self.dataloader = dataloader
        self.steps_per_epoch = len(dataloader) - len(dataloader) % accumulate_size

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        # The loader is read to its end: unlike torch's, some loaders do not restart otherwise.
        for index, batch in enumerate(self.dataloader):
            if index < self.steps_per_epoch:
                yield batch


class GradAccumLrSchedulerByStep:
    """Wraps a learning-rate scheduler of torch, and steps it once in N calls of :meth:`step`."""

    def __init__(self, lr_scheduler: Any, accumulate_size: int) -> None:
        self.lr_scheduler = lr_scheduler
        self.accumulate_size = accumulate_size
        self.accumulate_step = 0

    def __getattr__(self, name: str) -> Any:
        if name == "lr_scheduler":
            raise AttributeError(name)
        return getattr(self.lr_scheduler, name)

    @staticmethod
    def compute_effective_steps_per_epoch(dataloader: Any, accumulate_size: int) -> int:
        """Return the number of optimizer steps in an epoch."""
        return len(dataloader) // accumulate_size

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Count this call, and step the scheduler at every N-th call."""
        self.accumulate_step += 1
        if self.accumulate_step == self.accumulate_size:
            self.accumulate_step = 0
            self.lr_scheduler.step(*args, **kwargs)


class GradAccumGradientHandler:
    """Wraps a gradient handler, which then runs only after the last of N batches."""

    def __init__(self, grad_handler: Any, optimizer: GradAccumOptimizer) -> None:
        self.grad_handler = grad_handler
        self._optimizer = optimizer

    def handle_gradient(self) -> None:
        """Average the gradients over ranks after the last of N batches. After the other batches, do nothing."""
        if self._optimizer.is_full:
            self.grad_handler.handle_gradient()


def accumulate_gradient(
    model: nn.Module,
    optimizer: Any,
    dataloader: Any,
    accumulate_size: int,
    gradient_handlers: Iterable[Any] = (),
    lr_scheduler: Any = None,
) -> tuple[GradAccumOptimizer, Any, list[GradAccumGradientHandler], Any]:
    """Wrap training components so that the optimizer steps once in ``accumulate_size`` batches.

    ``dataloader`` and ``lr_scheduler`` may be None.

    Returns:
        The wrapped optimizer, data loader, gradient handlers and learning-rate scheduler.
    """
    wrapped = GradAccumOptimizer(optimizer, accumulate_size, model)
    loader = None if dataloader is None else GradAccumDataloader(dataloader, accumulate_size)
    handlers = [GradAccumGradientHandler(handler, wrapped) for handler in gradient_handlers]
    scheduler = None if lr_scheduler is None else GradAccumLrSchedulerByStep(lr_scheduler, accumulate_size)
    return wrapped, loader, handlers, scheduler
