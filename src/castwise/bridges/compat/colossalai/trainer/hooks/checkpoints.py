"""Hooks that save and load checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from castwise.bridges.compat.colossalai.logging import get_dist_logger
from castwise.bridges.compat.colossalai.trainer.hooks.base import BaseHook
from castwise.bridges.compat.colossalai.trainer.hooks.metric_hooks import LRSchedulerHook
from castwise.bridges.compat.colossalai.utils import load_checkpoint, save_checkpoint
from castwise.errors import StateError

__all__ = ["LoadCheckpointHook", "SaveCheckpointHook"]


def _scheduler(trainer: Any) -> Any:
    return next((hook.lr_scheduler for hook in trainer.hooks if isinstance(hook, LRSchedulerHook)), None)


class SaveCheckpointHook(BaseHook):
    """Saves a checkpoint of the training after every ``interval`` epochs, or batches if ``save_by_iter``.

    All ranks save together. No other training may use the folder ``checkpoint_dir``, which keeps the last two checkpoints in
    castwise's format.

    Raises:
        StateError: ``checkpoint_dir`` is not given.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | None = None,
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        if checkpoint_dir is None:
            raise StateError("SaveCheckpointHook: give checkpoint_dir, the folder to save into")
        self.interval = interval
        self.checkpoint_dir = checkpoint_dir
        self.model = model
        self.save_by_iter = save_by_iter

    def _save(self, trainer: Any, number: int) -> None:
        model = trainer.engine.model if self.model is None else self.model
        save_checkpoint(self.checkpoint_dir, number, model, trainer.engine.optimizer, _scheduler(trainer))
        get_dist_logger().info(f"checkpoint {number} saved in {self.checkpoint_dir}", ranks=[0])

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        if self.save_by_iter and (trainer.cur_step + 1) % self.interval == 0:
            self._save(trainer, trainer.cur_step + 1)

    def after_train_epoch(self, trainer: Any) -> None:
        if not self.save_by_iter and trainer.cur_epoch % self.interval == 0:
            self._save(trainer, trainer.cur_epoch)


class LoadCheckpointHook(BaseHook):
    """Loads a checkpoint before training, by default the newest that :class:`SaveCheckpointHook` saved after an epoch.

    With ``finetune``, training starts at epoch 0. A checkpoint that does not match the model raises an error, whatever
    ``strict`` is.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        epoch: int = -1,
        finetune: bool = False,
        strict: bool = False,
        priority: int = 0,
    ) -> None:
        super().__init__(priority)
        self.checkpoint_dir = checkpoint_dir
        self.epoch = epoch
        self.finetune = finetune

    def before_train(self, trainer: Any) -> None:
        """Load the checkpoint. Training continues at the epoch after the saved epoch, or at 0 with ``finetune``."""
        path = Path(self.checkpoint_dir)
        if self.epoch >= 0:
            path /= f"step-{self.epoch:08d}"
        engine = trainer.engine
        epoch = load_checkpoint(path, engine.model, engine.optimizer, _scheduler(trainer))
        trainer.cur_epoch = 0 if self.finetune else epoch + 1
        get_dist_logger().info(f"checkpoint of epoch {epoch} loaded from {self.checkpoint_dir}", ranks=[0])
