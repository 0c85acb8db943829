"""``colossalai.trainer``: epochs over an engine, with hooks."""

from __future__ import annotations

from castwise.compat.colossalai.trainer import hooks
from castwise.compat.colossalai.trainer.loop import Trainer

__all__ = ["Trainer", "hooks"]
