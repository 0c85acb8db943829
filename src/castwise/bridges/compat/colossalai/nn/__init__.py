"""``colossalai.nn``, as far as training with AMP needs it: learning-rate schedulers, optimizers and metrics."""

from __future__ import annotations

from castwise.bridges.compat.colossalai.nn import lr_scheduler, metric, optimizer
from castwise.bridges.compat.colossalai.nn.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmupLR,
    LinearWarmupLR,
)
from castwise.bridges.compat.colossalai.nn.metric import Accuracy
from castwise.bridges.compat.colossalai.nn.optimizer import (
    ColossalaiOptimizer,
    FusedAdam,
    FusedSGD,
    HybridAdam,
)
from castwise.bridges.compat.coverage import missing_attribute

__all__ = [
    "Accuracy",
    "ColossalaiOptimizer",
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "FusedAdam",
    "FusedSGD",
    "HybridAdam",
    "LinearWarmupLR",
    "lr_scheduler",
    "metric",
    "optimizer",
]
__getattr__ = missing_attribute("colossalai.nn")
