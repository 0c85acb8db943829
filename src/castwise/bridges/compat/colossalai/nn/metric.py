"""``colossalai.nn.metric``: ``Accuracy``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Accuracy"]


class Accuracy(nn.Module):
    """Counts the rows whose largest logit is at their label; for ``hooks.AccuracyHook``."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Count from logits ``[..., classes]`` of any dtype and integer targets ``[...]``; 0-dim int64."""
        with torch.no_grad():
            return (logits.argmax(-1) == targets).sum()
