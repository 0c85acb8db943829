"""``colossalai.nn``, as far as training with AMP needs it: rate schedulers, metrics, the optimizer's wrapper."""

from __future__ import annotations

from castwise.compat.colossalai.nn import lr_scheduler, metric, optimizer
from castwise.compat.colossalai.nn.metric import Accuracy
from castwise.compat.coverage import missing_attribute

__all__ = ["Accuracy", "lr_scheduler", "metric", "optimizer"]
__getattr__ = missing_attribute("colossalai.nn")
