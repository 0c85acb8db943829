"""``colossalai.trainer.hooks``: hooks that a :class:`Trainer` calls during training and evaluation.

Hooks with a lower priority number are called first, and hooks of equal priority in the order in which they are given.
``LossHook``, ``AccuracyHook`` and ``LoadCheckpointHook`` have priority 0, ``LRSchedulerHook`` has 1, and all others have 10.
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
