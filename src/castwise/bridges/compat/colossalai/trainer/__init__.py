"""``colossalai.trainer``: the class ``Trainer``, which trains an engine's model for some epochs and calls hooks."""

from __future__ import annotations

from castwise.bridges.compat.colossalai.trainer import hooks
from castwise.bridges.compat.colossalai.trainer.loop import Trainer
from castwise.bridges.compat.coverage import missing_attribute

__all__ = ["Trainer", "hooks"]
__getattr__ = missing_attribute("colossalai.trainer")
