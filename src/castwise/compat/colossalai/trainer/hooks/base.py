"""The moments of a loop."""

from __future__ import annotations

from typing import Any

__all__ = ["BaseHook"]


class BaseHook:
    """Does nothing at every moment; derive from it. Hooks whose ``priority`` is a lower number come first."""

    def __init__(self, priority: int) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Any) -> None:
        """All hooks are there, and ``trainer.states`` is empty."""

    def before_train(self, trainer: Any) -> None:
        """Before the first epoch."""

    def after_train(self, trainer: Any) -> None:
        """After the last epoch."""

    def before_train_epoch(self, trainer: Any) -> None:
        """Before an epoch of training."""

    def after_train_epoch(self, trainer: Any) -> None:
        """After an epoch of training."""

    def before_train_iter(self, trainer: Any) -> None:
        """Before a batch of training."""

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """After a batch of training, and after its step."""

    def before_test(self, trainer: Any) -> None:
        """Before evaluation."""

    def after_test(self, trainer: Any) -> None:
        """After evaluation."""

    def before_test_epoch(self, trainer: Any) -> None:
        """Before the pass of an evaluation."""

    def after_test_epoch(self, trainer: Any) -> None:
        """After the pass of an evaluation."""

    def before_test_iter(self, trainer: Any) -> None:
        """Before a batch of evaluation."""

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """After a batch of evaluation."""

    def init_runner_states(self, trainer: Any, key: str, val: Any) -> None:
        """Give ``trainer.states`` a value unless it has one."""
        trainer.states.setdefault(key, val)
