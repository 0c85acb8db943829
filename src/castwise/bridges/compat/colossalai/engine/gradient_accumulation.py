"""``gradient_accumulation = N``: N batches to a step."""

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
    """Divides losses by N, and steps, clears and clips once in N batches.

    If the model is in DistributedDataParallel, ranks exchange gradients only in the last of N batches.
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
        """Whether N batches have been accumulated, so that the next step is made."""
        return self.accumulate_step >= self.accumulate_size

    def count(self) -> None:
        """Count a batch."""
        self.accumulate_step += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients before the first of N batches."""
        if self.accumulate_step == 0:
            self.optim.zero_grad(set_to_none)

    def _alone(self) -> Any:
        return contextlib.nullcontext() if self._ddp is None or self.is_full else self._ddp.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Add gradients of a loss divided by N."""
        self.count()
        with self._alone():
            self.optim.backward(loss / self.accumulate_size)  # type: ignore[attr-defined]

    def backward_by_grad(self, tensor: Tensor, grad: Tensor) -> None:
        """Add gradients of an output whose own gradient is given, already divided by N."""
        self.count()
        with self._alone():
            self.optim.backward_by_grad(tensor, grad)  # type: ignore[attr-defined]

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> None:
        """Clip after the last of N batches."""
        if self.is_full:
            self.optim.clip_grad_norm(model, max_norm)  # type: ignore[attr-defined]

    def step(self, closure: Any = None) -> Any:
        """Step after the last of N batches; before that do nothing and return None."""
        if not self.is_full:
            return None
        self.accumulate_step = 0
        return super().step(closure)


class GradAccumDataloader:
    """A loader of known length without the last batches if they are fewer than N."""

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
        # read to the end: a loader that is not torch's may not restart otherwise
        for index, batch in enumerate(self.dataloader):
            if index < self.steps_per_epoch:
                yield batch


class GradAccumLrSchedulerByStep:
    """Any of torch's learning-rate schedulers, stepped once in N calls."""

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
        """How many steps an epoch has."""
        return len(dataloader) // accumulate_size

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Count, and step the scheduler at every N-th call."""
        self.accumulate_step += 1
        if self.accumulate_step == self.accumulate_size:
            self.accumulate_step = 0
            self.lr_scheduler.step(*args, **kwargs)


class GradAccumGradientHandler:
    """A gradient handler that runs only before a step that is made."""

    def __init__(self, grad_handler: Any, optimizer: GradAccumOptimizer) -> None:
        self.grad_handler = grad_handler
        self._optimizer = optimizer

    def handle_gradient(self) -> None:
        """Average gradients after the last of N batches."""
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
    """Wrap the training components so that N batches make a step; loader and scheduler may be None.

    Returns:
        Optimizer, loader, handlers and scheduler.
    """
    wrapped = GradAccumOptimizer(optimizer, accumulate_size, model)
    loader = None if dataloader is None else GradAccumDataloader(dataloader, accumulate_size)
    handlers = [GradAccumGradientHandler(handler, wrapped) for handler in gradient_handlers]
    scheduler = None if lr_scheduler is None else GradAccumLrSchedulerByStep(lr_scheduler, accumulate_size)
    return wrapped, loader, handlers, scheduler
