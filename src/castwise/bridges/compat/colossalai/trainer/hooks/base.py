"""The events of a loop."""

from __future__ import annotations

from typing import Any

__all__ = ["BaseHook"]


class BaseHook:
    """A hook that does nothing, to derive from. Hooks with a lower ``priority`` are called first.

    They are called before and after training, evaluation (``test``), each of their epochs and each batch (``iter``;
    also after its step). ``after_hook_is_attached``: all hooks are registered, and ``trainer.states`` is empty.
    """

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def _nothing(self, trainer: Any) -> None:
        pass

    def _nothing_of_a_batch(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        pass

    after_hook_is_attached = _nothing
    before_train = before_train_epoch = before_train_iter = _nothing
    before_test = before_test_epoch = before_test_iter = _nothing
    after_train_iter = after_test_iter = _nothing_of_a_batch
    after_train = after_train_epoch = after_test = after_test_epoch = _nothing

    def init_runner_states(self, trainer: Any, key: str, val: Any) -> None:
        """Set a value of ``trainer.states`` unless it is set already."""
        trainer.states.setdefault(key, val)
