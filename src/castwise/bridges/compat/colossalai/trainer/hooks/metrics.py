"""Metrics accumulated over batches, and over data parallel ranks when they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from castwise.bridges.compat.colossalai.context import ParallelMode
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.bridges.compat.colossalai.utils import get_current_device

__all__ = [
    "AccuracyMetric",
    "LearningRateMetric",
    "LossMetric",
    "Metric",
    "ThroughputMetric",
    "over_data_ranks",
]


def over_data_ranks(*values: float | Tensor) -> list[float]:
    """The sums of some numbers over the data parallel ranks, in one message. Synchronises."""
    numbers = [torch.as_tensor(value, dtype=torch.float64, device="cpu").reshape(()) for value in values]
    total = torch.stack(numbers)
    if gpc.get_world_size(ParallelMode.DATA) > 1:
        total = total.to(get_current_device(), torch.float32 if get_current_device().type == "mps" else None)
        dist.all_reduce(total, group=gpc.get_group(ParallelMode.DATA))
    return [float(value) for value in total]


class Metric(ABC):
    """A metric; if ``epoch_only`` it is read once per epoch, not at each batch."""

    def __init__(self, epoch_only: bool) -> None:
        self.epoch_only = epoch_only

    @abstractmethod
    def reset(self) -> None:
        """Start an epoch."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch."""

    @abstractmethod
    def get_last_step_value(self) -> Any:
        """The value of the last batch."""

    @abstractmethod
    def get_accumulated_value(self) -> Any:
        """The value of the epoch; all data parallel ranks must call it together."""

    @staticmethod
    def is_better(a: Any, b: Any) -> bool | None:
        """Whether ``a`` is better than ``b``; None if neither is."""
        return None


class LearningRateMetric(Metric):
    """The learning rate of the optimizer's first group."""

    def __init__(self, epoch_only: bool, initial_lr: float = 0.0) -> None:
        super().__init__(epoch_only)
        self.lr = initial_lr

    def reset(self) -> None:
        """Keep the rate."""

    def update(self, lr: float) -> None:
        self.lr = lr

    def get_last_step_value(self) -> float:
        return self.lr

    get_accumulated_value = get_last_step_value


class _Ratio(Metric):
    """A ratio of two amounts, each summed over batches and, when read, over data parallel ranks."""

    def __init__(self, epoch_only: bool) -> None:
        super().__init__(epoch_only)
        self.reset()

    def reset(self) -> None:
        self._last: tuple[float, Any] = (0, 0)
        self._total: tuple[float, Any] = (0, 0)

    def _add(self, count: float, amount: Any) -> None:
        self._last = (count, amount)
        self._total = (self._total[0] + count, self._total[1] + amount)

    def _ratio(self, count: float, amount: Any) -> float:
        count, amount = over_data_ranks(count, amount)
        return amount / count if count else 0.0

    def get_last_step_value(self) -> float:
        return self._ratio(*self._last)

    def get_accumulated_value(self) -> float:
        return self._ratio(*self._total)


class LossMetric(_Ratio):
    """The mean loss."""

    def update(self, loss: Tensor) -> None:
        """Add the loss of a batch, without waiting for the device."""
        self._add(1, loss.detach().float())

    def get_last_step_value(self) -> float:
        """This rank's loss of the last batch. Synchronises."""
        return float(self._last[1])

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        """Whether ``a`` is smaller than ``b``."""
        return a < b


class AccuracyMetric(_Ratio):
    """The fraction of correct answers, counted by a function such as ``colossalai.nn.metric.Accuracy``."""

    def __init__(self, epoch_only: bool, accuracy_func: Callable[[Any, Any], Any]) -> None:
        super().__init__(epoch_only)
        self.acc = accuracy_func

    def update(self, logits: Any, targets: Any, batch_size: int) -> None:
        """Add a batch; of several outputs or targets the first is used."""
        logits = logits[0] if isinstance(logits, (list, tuple)) else logits
        targets = targets[0] if isinstance(targets, (list, tuple)) else targets
        self._add(batch_size, self.acc(logits, targets))

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        """Whether ``a`` is larger than ``b``."""
        return a > b


class ThroughputMetric(_Ratio):
    """Samples per second of all data parallel ranks together, without the first ``ignored_steps`` batches.

    Options are those of ``ThroughputHook``.
    """

    def __init__(
        self, epoch_only: bool, ignored_steps: int = 0, tflop_per_step: float = 0, use_local: bool = False
    ) -> None:
        super().__init__(epoch_only)
        self._left = ignored_steps
        self._tflop, self._local = tflop_per_step, use_local

    def update(self, num_samples: int, time: float) -> None:
        """Add a batch: samples on this rank, and seconds."""
        if self._left:
            self._left -= 1
            self._last = (time, num_samples)
        else:
            self._add(time, num_samples)

    def _sums(self, time_s: float, samples: float) -> tuple[float, float]:
        """Mean seconds per rank, and samples on all ranks."""
        ranks = gpc.get_world_size(ParallelMode.DATA)
        if self._local:
            return time_s, samples * ranks
        time_s, samples = over_data_ranks(time_s, samples)
        return time_s / ranks, samples

    def _ratio(self, count: float, amount: Any) -> float:
        time_s, samples = self._sums(count, amount)
        return samples / time_s if time_s else 0.0

    def get_last_step_info(self) -> str:
        """Samples per second of the last batch as text, with TFLOP/s if the operations are known."""
        time_s, samples = self._sums(*self._last)
        rate = samples / time_s if time_s else 0.0
        more = f", {self._tflop / time_s:.4g} TFLOP/s" if self._tflop and time_s else ""
        return f"{rate:.4g} samples/s{more}"
