"""``colossalai.nn.metric``: ``Accuracy``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Accuracy"]


class Accuracy(nn.Module):
    """Counts correct predictions: rows whose largest logit is that of the target class. ``hooks.AccuracyHook`` uses it."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the number of correct predictions, as a 0-dim int64 tensor.

        Args:
            logits: Logits of shape ``[..., classes]``, of any dtype.
            targets: Integer target classes of shape ``[...]``.
        """
        with torch.no_grad():
            return (logits.argmax(-1) == targets).sum()
