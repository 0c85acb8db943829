"""The base class of hooks, which names the events at which a trainer calls hooks."""

from __future__ import annotations

from typing import Any

__all__ = ["BaseHook"]


class BaseHook:
    """The base class of hooks, whose methods do nothing. Hooks with a lower ``priority`` are called first.

    A trainer calls ``before_train`` and ``after_train`` around a training, and ``before_test`` and ``after_test`` around an
    evaluation. Around each epoch and each batch, it calls the methods whose names end in ``_epoch`` and ``_iter``.
    ``after_train_iter`` is called after the optimizer step. ``after_hook_is_attached`` is called when all hooks are registered
    and ``trainer.states`` is still empty.
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
