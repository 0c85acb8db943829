"""``Trainer``: the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from castwise.bridges.compat.colossalai.engine import Engine
from castwise.bridges.compat.colossalai.trainer.hooks import BaseHook
from castwise.bridges.compat.colossalai.utils import MultiTimer
from castwise.bridges.compat.colossalai.utils.common import speaks_for_all
from castwise.errors import StateError

__all__ = ["Trainer"]


class Trainer:
    """Trains and evaluates an engine's model, and calls hooks before and after each epoch and batch.

    Args:
        engine: The engine that ``colossalai.initialize`` returns.
        timer: Measures epochs and steps under the names ``Train-epoch``, ``Train-step``, ``Test-epoch`` and ``Test-step``.
        logger: Logs which hooks are registered.

    Attributes:
        states: Values that hooks share. ``metrics`` holds the metrics by mode (``train`` or ``test``) and name, and
            ``step_metrics`` the values of the last batch for the progress bar.
        hooks: The hooks, sorted by priority with the lowest number first.
    """

    def __init__(self, engine: Engine, timer: MultiTimer | None = None, logger: Any = None) -> None:
        self.engine = engine
        self.timer = MultiTimer(on=False) if timer is None else timer
        self.logger = logger
        self.states: dict[str, Any] = {}
        self.hooks: list[BaseHook] = []
        self.cur_epoch = 0
        self.cur_step = 0
        self.max_epochs = 0
        self.max_steps: int | None = None
        self.steps_per_epoch = 0

    # --- read by hooks --------------------------------------------------------------------------------------

    def _call_hooks(self, moment: str, *output: Any) -> None:
        for hook in self.hooks:
            getattr(hook, moment)(self, *output)

    def _attach(self, hooks: Sequence[BaseHook] | None) -> None:
        for hook in hooks or ():
            if not isinstance(hook, BaseHook):
                raise StateError(
                    f"Trainer: {hook!r} is not a hook; derive it from colossalai.trainer.hooks.BaseHook"
                )
        self.states = {}
        self.hooks = sorted(hooks or (), key=lambda hook: hook.priority)
        if self.logger is not None:
            for hook in self.hooks:
                self.logger.info(f"hook {type(hook).__name__}, priority {hook.priority}", ranks=[0])
        self._call_hooks("after_hook_is_attached")

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self.timer.start(name)
        yield
        self.timer.stop(name, keep_in_history=True)

    # --- the loop -------------------------------------------------------------------------------------------

    def fit(
        self,
        train_dataloader: Any,
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Any = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Train the model of the engine.

        Args:
            train_dataloader: A data loader of pairs ``(inputs, targets)``, which has a length.
            epochs: The number of the epoch after which training ends. After a checkpoint was loaded, the first
                ``cur_epoch`` epochs count as done.
            max_steps: The number of batches after which training ends, if given.
            test_dataloader: A data loader for evaluation.
            test_interval: The number of epochs from one evaluation to the next. The first evaluation follows the first
                epoch.
            hooks: The hooks, which are called in the order of their priorities.
            display_progress: Whether one rank shows a progress bar.
            return_output_label: Whether the outputs and targets of each batch are kept for the hooks.
        """
        self.steps_per_epoch = len(train_dataloader)
        self.max_epochs, self.max_steps = epochs, max_steps
        show = display_progress and speaks_for_all()
        self._attach(hooks)
        self.engine.train()
        self._call_hooks("before_train")
        if self.cur_epoch:  # a checkpoint was loaded
            self.cur_step = self.cur_epoch * self.steps_per_epoch
        for epoch in range(self.cur_epoch, epochs):
            self.engine.train()
            self._epoch("train", train_dataloader, f"epoch {epoch}, training", show, return_output_label)
            self.timer.reset("Train-epoch")
            if test_dataloader is not None and epoch % test_interval == 0:
                self._evaluate(test_dataloader, f"epoch {epoch}, evaluation", show, return_output_label)
            self.cur_epoch += 1
            if self._is_over():
                if self.logger is not None:
                    self.logger.info(f"stopped after {self.cur_step} steps", ranks=[0])
                break
        self._call_hooks("after_train")
        self.timer.reset("Train-step")
        self.timer.reset("Train-epoch")

    def evaluate(
        self,
        test_dataloader: Any,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Evaluate the engine's model. The arguments are those of :meth:`fit`."""
        show = display_progress and speaks_for_all()
        self._attach(hooks)
        self._evaluate(test_dataloader, "evaluation", show, return_output_label)

    def predict(self, data: Any) -> Any:
        """Return the model's outputs for some inputs, without gradients."""
        self.engine.eval()
        with torch.no_grad():
            output, _, _ = self.engine.execute_schedule(
                iter([(data, None)]), forward_only=True, return_loss=False
            )
        return output

    def _is_over(self) -> bool:
        return self.max_steps is not None and self.cur_step >= self.max_steps

    def _evaluate(self, loader: Any, what: str, show: bool, keep: bool) -> None:
        self.engine.eval()
        self._call_hooks("before_test")
        self._epoch("test", loader, what, show, keep)
        self._call_hooks("after_test")
        self.timer.reset("Test-step")
        self.timer.reset("Test-epoch")

    def _epoch(self, mode: str, loader: Any, what: str, show: bool, keep: bool) -> None:
        """Train or evaluate for an epoch, as ``mode`` says (``train`` or ``test``). ``max_steps`` may end training early."""
        training, name = mode == "train", mode.capitalize()
        batches = iter(loader)
        self._call_hooks(f"before_{mode}_epoch")
        with (
            self._timed(f"{name}-epoch"),
            _progress(what, show, len(loader)) as bar,
            torch.set_grad_enabled(training),
        ):
            for _ in range(len(loader)):
                self._call_hooks(f"before_{mode}_iter")
                with self._timed(f"{name}-step"):
                    if training:
                        self.engine.zero_grad()
                    output = self.engine.execute_schedule(
                        batches, forward_only=not training, return_loss=True, return_output_label=keep
                    )
                    if training:
                        self.engine.step()
                self._call_hooks(f"after_{mode}_iter", *output)
                self.cur_step += training
                bar(self.states.get("step_metrics"))
                if training and self._is_over():
                    break
        self._call_hooks(f"after_{mode}_epoch")


@contextlib.contextmanager
def _progress(what: str, show: bool, total: int) -> Iterator[Any]:
    """Yield a function to call after each batch, which advances a progress bar and shows values beside the bar."""
    if not show:
        yield lambda metrics: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task(what, total=total)

        def advance(metrics: dict[str, Any] | None) -> None:
            said = ", ".join(f"{name} {value}" for name, value in (metrics or {}).items())
            progress.update(task, advance=1, description=f"{what} {said}".strip())

        yield advance
