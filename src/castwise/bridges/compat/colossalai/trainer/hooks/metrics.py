"""Metrics that accumulate over batches. When a metric is read, it is summed over the data parallel ranks."""

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
    """Return the sum of each number over the data parallel ranks, using a single all-reduce. Synchronises with the device."""
    numbers = [torch.as_tensor(value, dtype=torch.float64, device="cpu").reshape(()) for value in values]
    total = torch.stack(numbers)
    if gpc.get_world_size(ParallelMode.DATA) > 1:
        try:
            total = total.to(get_current_device())
        except (RuntimeError, TypeError):  # the device has no fp64
            total = total.to(get_current_device(), torch.float32)
        dist.all_reduce(total, group=gpc.get_group(ParallelMode.DATA))
    return [float(value) for value in total]


class Metric(ABC):
    """The base class of metrics. A metric with ``epoch_only`` is read once per epoch instead of at each batch."""

    def __init__(self, epoch_only: bool) -> None:
        self.epoch_only = epoch_only

    @abstractmethod
    def reset(self) -> None:
        """Forget the batches of the last epoch."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add the values of a batch to the metric."""

    @abstractmethod
    def get_last_step_value(self) -> Any:
        """Return the metric of the last batch."""

    @abstractmethod
    def get_accumulated_value(self) -> Any:
        """Return the metric over the epoch. All data parallel ranks must make this call together."""

    @staticmethod
    def is_better(a: Any, b: Any) -> bool | None:
        """Whether ``a`` is better than ``b``; None for a metric that is neither better when larger nor when smaller."""
        return None


class LearningRateMetric(Metric):
    """The learning rate of the optimizer's first parameter group."""

    def __init__(self, epoch_only: bool, initial_lr: float = 0.0) -> None:
        super().__init__(epoch_only)
        self.lr = initial_lr

    def reset(self) -> None:
        """Keep the learning rate, which does not depend on the epoch."""

    def update(self, lr: float) -> None:
        self.lr = lr

    def get_last_step_value(self) -> float:
        return self.lr

    get_accumulated_value = get_last_step_value


class _Ratio(Metric):
    """A metric that is a ratio of two sums over batches, such as the loss per batch.

    When the metric is read, both sums are taken over the data parallel ranks too.
    """

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
    """The mean loss over batches and data parallel ranks."""

    def update(self, loss: Tensor) -> None:
        """Add the loss of a batch, without waiting for the device."""
        self._add(1, loss.detach().float())

    def get_last_step_value(self) -> float:
        """Return this rank's loss of the last batch, which synchronises with the device."""
        return float(self._last[1])

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        """Whether ``a`` is smaller than ``b``."""
        return a < b


class AccuracyMetric(_Ratio):
    """The fraction of correct outputs. A function such as ``colossalai.nn.metric.Accuracy`` counts the correct outputs."""

    def __init__(self, epoch_only: bool, accuracy_func: Callable[[Any, Any], Any]) -> None:
        super().__init__(epoch_only)
        self.acc = accuracy_func

    def update(self, logits: Any, targets: Any, batch_size: int) -> None:
        """Add a batch. If there are several outputs or targets, the first is used."""
        logits = logits[0] if isinstance(logits, (list, tuple)) else logits
        targets = targets[0] if isinstance(targets, (list, tuple)) else targets
        self._add(batch_size, self.acc(logits, targets))

    @staticmethod
    def is_better(a: float, b: float) -> bool:
        """Whether ``a`` is larger than ``b``."""
        return a > b


class ThroughputMetric(_Ratio):
    """The samples per second of all data parallel ranks together, without the first ``ignored_steps`` batches.

    The options are those of ``ThroughputHook``.
    """

    def __init__(
        self, epoch_only: bool, ignored_steps: int = 0, tflop_per_step: float = 0, use_local: bool = False
    ) -> None:
        super().__init__(epoch_only)
        self._left = ignored_steps
        self._tflop, self._local = tflop_per_step, use_local

    def update(self, num_samples: int, time: float) -> None:
        """Add a batch of ``num_samples`` samples on this rank, which took ``time`` seconds."""
        if self._left:
            self._left -= 1
            self._last = (time, num_samples)
        else:
            self._add(time, num_samples)

    def _sums(self, time_s: float, samples: float) -> tuple[float, float]:
        """Return the mean time of the ranks in seconds, and the number of samples on all ranks together."""
        ranks = gpc.get_world_size(ParallelMode.DATA)
        if self._local:
            return time_s, samples * ranks
        time_s, samples = over_data_ranks(time_s, samples)
        return time_s / ranks, samples

    def _ratio(self, count: float, amount: Any) -> float:
        time_s, samples = self._sums(count, amount)
        return samples / time_s if time_s else 0.0

    def get_last_step_info(self) -> str:
        """Return the samples per second of the last batch as text, with TFLOP/s if ``tflop_per_step`` is given."""
        time_s, samples = self._sums(*self._last)
        rate = samples / time_s if time_s else 0.0
        more = f", {self._tflop / time_s:.4g} TFLOP/s" if self._tflop and time_s else ""
        return f"{rate:.4g} samples/s{more}"
