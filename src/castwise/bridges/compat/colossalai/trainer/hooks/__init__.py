"""``colossalai.trainer.hooks``: hooks for events of a :class:`Trainer`'s loop.

Priorities of the hooks here, lower numbers first, and equal ones in the order given: ``LossHook``, ``AccuracyHook``
and ``LoadCheckpointHook`` 0, ``LRSchedulerHook`` 1, all others 10.
"""

from __future__ import annotations

from castwise.bridges.compat.colossalai.trainer.hooks.base import BaseHook
from castwise.bridges.compat.colossalai.trainer.hooks.checkpoints import (
    LoadCheckpointHook,
    SaveCheckpointHook,
)
from castwise.bridges.compat.colossalai.trainer.hooks.logs import (
    LogMemoryByEpochHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    LogTimingByEpochHook,
    TensorboardHook,
)
from castwise.bridges.compat.colossalai.trainer.hooks.metric_hooks import (
    AccuracyHook,
    LossHook,
    LRSchedulerHook,
    MetricHook,
    ThroughputHook,
)
from castwise.bridges.compat.colossalai.trainer.hooks.metrics import Metric
from castwise.bridges.compat.coverage import missing_attribute

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "LRSchedulerHook",
    "LoadCheckpointHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "Metric",
    "MetricHook",
    "SaveCheckpointHook",
    "TensorboardHook",
    "ThroughputHook",
]
__getattr__ = missing_attribute("colossalai.trainer.hooks")
