"""Hooks that show metrics in the progress bar, in the log or in TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from castwise.bridges.compat.colossalai.context import ParallelMode
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.bridges.compat.colossalai.trainer.hooks.base import BaseHook
from castwise.bridges.compat.colossalai.trainer.hooks.metrics import ThroughputMetric
from castwise.bridges.compat.colossalai.utils import MultiTimer, is_no_pp_or_last_stage, report_memory_usage
from castwise.bridges.compat.colossalai.utils.common import speaks_for_all
from castwise.errors import StateError

__all__ = [
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "TensorboardHook",
]


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _metrics(trainer: Any, mode: str) -> dict[str, Any]:
    found: dict[str, Any] = trainer.states.get("metrics", {}).get(mode, {})
    return found


class LogMetricByStepHook(BaseHook):
    """Shows the metrics of each batch beside the progress bar."""

    def _collect(self, trainer: Any, mode: str) -> None:
        trainer.states["step_metrics"] = {
            name.lower(): metric.get_last_step_info()
            if isinstance(metric, ThroughputMetric)
            else _number(metric.get_last_step_value())
            for name, metric in _metrics(trainer, mode).items()
        }

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        self._collect(trainer, "train")

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        self._collect(trainer, "test")


class _ByEpoch(BaseHook):
    """The base class of hooks that log every ``interval``-th epoch, on one rank. ``log_eval`` logs evaluations too."""

    def __init__(self, logger: Any, interval: int = 1, priority: int = 10, log_eval: bool = True) -> None:
        super().__init__(priority)
        self.logger = logger
        self._interval = interval
        self._log_eval = log_eval
        self._is_rank_to_log = speaks_for_all()

    def _is_due(self, trainer: Any) -> bool:
        return bool(trainer.cur_epoch % self._interval == 0)

    def _log(self, trainer: Any, mode: str, message: str) -> None:
        if self._is_rank_to_log and message:
            self.logger.info(f"[Epoch {trainer.cur_epoch} / {mode}]: {message}")


class LogMetricByEpochHook(_ByEpoch):
    """Logs the metrics of every ``interval``-th epoch."""

    def _say(self, trainer: Any, mode: str) -> None:
        if self._is_due(trainer):  # on all ranks, since reading a metric sums over the ranks
            values = [
                f"{name} = {_number(metric.get_accumulated_value())}"
                for name, metric in _metrics(trainer, mode).items()
            ]
            self._log(trainer, mode.capitalize(), " | ".join(values))

    def after_train_epoch(self, trainer: Any) -> None:
        self._say(trainer, "train")

    def after_test_epoch(self, trainer: Any) -> None:
        self._say(trainer, "test")


class LogTimingByEpochHook(_ByEpoch):
    """Logs the times of epochs and batches that ``timer`` has measured, every ``interval``-th epoch.

    The first ``ignore_num_train_steps`` training batches are left out of the mean time of a batch.
    """

    def __init__(
        self,
        timer: MultiTimer,
        logger: Any,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        ignore_num_train_steps: int = 0,
    ) -> None:
        super().__init__(logger, interval, priority, log_eval)
        self._timer = timer
        self._ignore = ignore_num_train_steps

    def _message(self, mode: str) -> str:
        parts = []
        for name, timer in self._timer:
            if name.startswith(mode):
                if name == "Train-step" and self._ignore:
                    timer.forget_first(self._ignore)
                    self._ignore = 0
                mean = f", mean = {_number(timer.get_history_mean())} s" if timer.has_history else ""
                parts.append(f"{name}: last = {_number(timer.get_elapsed_time())} s{mean}")
        return " | ".join(parts)

    def after_train_epoch(self, trainer: Any) -> None:
        if self._is_due(trainer):
            message = f"{self._message('Train')} | #steps/epoch = {trainer.steps_per_epoch}"
            self._log(trainer, "Train", message)

    def after_test_epoch(self, trainer: Any) -> None:
        if self._log_eval and self._is_due(trainer):
            self._log(trainer, "Test", self._message("Test"))


class LogMemoryByEpochHook(_ByEpoch):
    """Logs the memory in use before training and every ``interval``-th epoch.

    With ``report_cpu``, the peak memory of the process is logged too.
    """

    def __init__(
        self,
        logger: Any,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        report_cpu: bool = False,
    ) -> None:
        super().__init__(logger, interval, priority, log_eval)
        self._report_cpu = report_cpu

    def _say(self, trainer: Any, when: str) -> None:
        if self._is_due(trainer):
            report_memory_usage(when, self.logger, self._report_cpu)

    def before_train(self, trainer: Any) -> None:
        self._say(trainer, "before training")

    def after_train_epoch(self, trainer: Any) -> None:
        self._say(trainer, f"[Epoch {trainer.cur_epoch} / Train]")

    def after_test(self, trainer: Any) -> None:
        if self._log_eval:
            self._say(trainer, f"[Epoch {trainer.cur_epoch} / Test]")


class TensorboardHook(BaseHook):
    """Writes the metrics as TensorBoard events. Each rank of the group ``parallel_mode`` writes into its own folder.

    If ``ranks`` is given, only these ranks of the group write.

    Raises:
        StateError: A rank that should write is not in the last stage of the pipeline. Only the last stage has metrics.
    """

    def __init__(
        self,
        log_dir: str,
        ranks: Sequence[int] | None = None,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        rank = gpc.get_local_rank(parallel_mode)
        self.writer: Any = None
        if ranks is None or rank in ranks:
            if not is_no_pp_or_last_stage():
                raise StateError(
                    f"TensorboardHook(ranks={ranks!r}): rank {rank} is not in the last stage of the pipeline, and only that stage has "
                    "metrics; give the ranks of the last stage"
                )
            from torch.utils.tensorboard import SummaryWriter

            folder = Path(log_dir) / f"{parallel_mode.value}_rank_{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            self.writer = SummaryWriter(str(folder), filename_suffix=f"_rank_{rank}")

    def _write(self, trainer: Any, mode: str, by_epoch: bool) -> None:
        for name, metric in _metrics(trainer, mode).items():
            if metric.epoch_only is by_epoch:
                value = metric.get_accumulated_value() if by_epoch else metric.get_last_step_value()
                if self.writer is not None:
                    self.writer.add_scalar(f"{name}/{mode}", value, trainer.cur_step)

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        self._write(trainer, "train", by_epoch=False)

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        self._write(trainer, "test", by_epoch=False)

    def after_train_epoch(self, trainer: Any) -> None:
        self._write(trainer, "train", by_epoch=True)

    def after_test_epoch(self, trainer: Any) -> None:
        self._write(trainer, "test", by_epoch=True)

    def after_train(self, trainer: Any) -> None:
        """Flush the events to disk."""
        if self.writer is not None:
            self.writer.flush()
