"""Hooks that collect metrics. In a pipeline only the last stage has metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from castwise.bridges.compat.colossalai.trainer.hooks.base import BaseHook
from castwise.bridges.compat.colossalai.trainer.hooks.metrics import (
    AccuracyMetric,
    LearningRateMetric,
    LossMetric,
    ThroughputMetric,
)
from castwise.bridges.compat.colossalai.utils import is_no_pp_or_last_stage
from castwise.errors import StateError

__all__ = ["AccuracyHook", "LRSchedulerHook", "LossHook", "MetricHook", "ThroughputHook"]


class MetricHook(BaseHook):
    """The base class of hooks that add metrics to ``trainer.states["metrics"]``."""

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)
        self._is_stage_to_compute = is_no_pp_or_last_stage()

    def _enter(self, trainer: Any, name: str, enter: bool, **metrics: Any) -> None:
        self.init_runner_states(trainer, "metrics", {"train": {}, "test": {}})
        for mode, metric in metrics.items() if enter else ():
            trainer.states["metrics"][mode][name] = metric


class LossHook(MetricHook):
    """Collects the loss as a metric: of each batch in training, and the mean over the epoch in evaluation."""

    def after_hook_is_attached(self, trainer: Any) -> None:
        self.train_loss, self.test_loss = LossMetric(epoch_only=False), LossMetric(epoch_only=True)
        self._enter(trainer, "Loss", self._is_stage_to_compute, train=self.train_loss, test=self.test_loss)

    def before_train_epoch(self, trainer: Any) -> None:
        self.train_loss.reset()

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        if self._is_stage_to_compute:
            self.train_loss.update(loss)

    def before_test_epoch(self, trainer: Any) -> None:
        self.test_loss.reset()

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        if self._is_stage_to_compute:
            self.test_loss.update(loss)


class AccuracyHook(MetricHook):
    """Collects the accuracy in evaluation as a metric.

    ``accuracy_func`` counts the correct outputs, given the outputs and the targets.
    """

    def __init__(self, accuracy_func: Callable[[Any, Any], Any], priority: int = 0) -> None:
        super().__init__(priority)
        self.accuracy_func = accuracy_func

    def after_hook_is_attached(self, trainer: Any) -> None:
        self.metric = AccuracyMetric(epoch_only=True, accuracy_func=self.accuracy_func)
        self._enter(trainer, "Accuracy", self._is_stage_to_compute, test=self.metric)

    def before_test(self, trainer: Any) -> None:
        self.metric.reset()

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        if self._is_stage_to_compute:
            if output is None:
                raise StateError("AccuracyHook needs outputs: call fit(..., return_output_label=True)")
            self.metric.update(output, label, trainer.engine.schedule.batch_size)


class LRSchedulerHook(MetricHook):
    """Steps a learning-rate scheduler after each epoch, or after each batch if ``by_epoch`` is False.

    With ``store_lr_in_state``, the learning rate is a metric.
    """

    def __init__(
        self, lr_scheduler: Any, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1
    ) -> None:
        super().__init__(priority)
        self.lr_scheduler = lr_scheduler
        self.by_epoch = by_epoch
        self.store_lr_in_state = store_lr_in_state

    def after_hook_is_attached(self, trainer: Any) -> None:
        self.metric = LearningRateMetric(self.by_epoch, self.lr_scheduler.get_last_lr()[0])
        self._enter(trainer, "LR", self.store_lr_in_state, train=self.metric)

    def _step(self) -> None:
        self.lr_scheduler.step()
        self.metric.update(self.lr_scheduler.get_last_lr()[0])

    def after_train_epoch(self, trainer: Any) -> None:
        if self.by_epoch:
            self._step()

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        if not self.by_epoch:
            self._step()


class ThroughputHook(MetricHook):
    """Collects the samples per second as a metric. The trainer must have a timer.

    Args:
        ignored_steps: Number of batches at the start that are not counted.
        tflop_per_step: The floating-point operations of a batch, in 10^12. If given, TFLOP/s are shown too.
        use_local: Use this rank's time and samples for every rank, without communication.
    """

    def __init__(
        self, ignored_steps: int = 0, priority: int = 10, tflop_per_step: float = 0, use_local: bool = False
    ) -> None:
        super().__init__(priority)
        self._options = (ignored_steps, tflop_per_step, use_local)

    def after_hook_is_attached(self, trainer: Any) -> None:
        if not trainer.timer.is_on():
            raise StateError("ThroughputHook needs a timer: Trainer(engine, timer=MultiTimer())")
        self.metric = ThroughputMetric(True, *self._options)
        self._enter(trainer, "Throughput", self._is_stage_to_compute, train=self.metric, test=self.metric)

    def _update(self, trainer: Any, timer: str) -> None:
        time_s = trainer.timer.get_timer(timer).get_elapsed_time()
        self.metric.update(trainer.engine.schedule.batch_size, time_s)

    def before_train_epoch(self, trainer: Any) -> None:
        self.metric.reset()

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        self._update(trainer, "Train-step")

    def before_test(self, trainer: Any) -> None:
        self.metric.reset()

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        self._update(trainer, "Test-step")
