"""Steps of optimizers that evaluate the loss themselves, such as LBFGS: undone if a gradient is not finite.

There are two ways: :func:`step_or_restore` if castwise calls the step, and :class:`ClosureStep` if the script does,
where the step cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from castwise.core.casting.trees import tensors_in
from castwise.core.scaler.gradients import stored


class _NonFiniteEvaluation(Exception):
    """An evaluation of the closure gave a non-finite gradient; the step is undone."""


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, deque):
        return deque(map(_copy, value), value.maxlen)
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value


class Snapshot:
    """Parameters, state and options of an optimizer before a step.

    It copies all of them; only steps with a closure pay for that.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._values = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._state = {parameter: _copy(state) for parameter, state in optimizer.state.items()}
        self._options = [
            {key: (value, _copy(value)) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        """Restore everything; parameters, and options that are tensors, in place."""
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.copy_(value)
            for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
                for key in group.keys() - options.keys() - {"params"}:
                    del group[key]
                for key, (given, before) in options.items():
                    group[key] = given.copy_(before) if isinstance(given, torch.Tensor) else before
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def step_or_restore(
    optimizer: Optimizer,
    closure: Callable[[], Any],
    look: Callable[[], Iterable[torch.Tensor]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, bool]:
    """Make a step with a closure, and undo it at the first evaluation with a non-finite gradient.

    ``look`` is called after each evaluation; it unscales the gradients and returns their non-finite flags.

    Returns:
        What ``optimizer.step(closure, *args, **kwargs)`` returned, or None if the step was undone; and whether it was
        undone.
    """
    snapshot = Snapshot(optimizer)

    def evaluate() -> Any:
        with torch.enable_grad():
            loss = closure()
        if any(flag.item() for flag in look()):
            raise _NonFiniteEvaluation
        return loss

    try:
        return optimizer.step(evaluate, *args, **kwargs), False
    except _NonFiniteEvaluation:
        snapshot.restore()
        return None, True


class Guard(Protocol):
    """Interface to whatever handles steps that are called outside ``Amp.step``."""

    tries: int
    """How often a closure may be evaluated again, at half the loss scale each time."""

    def scale(self) -> torch.Tensor:
        """A copy of the loss scale, 0-dim."""

    def put_back_scale(self, scale: torch.Tensor) -> None:
        """Set the loss scale back to a value that :meth:`scale` returned."""

    def evaluating(self) -> AbstractContextManager[object]:
        """Mark that a closure runs: gradients of other optimizers that it clears do not count as skipped steps."""

    def look_at_evaluation(self, optimizer: Optimizer, *, again: bool, zeros: bool) -> bool:
        """Whether a gradient is not finite; if so, all gradients are removed or replaced by zeros.

        ``again``: the closure will be evaluated once more in that case.
        """

    def sync(self, optimizer: Optimizer) -> None:
        """Copy an optimizer's masters into the model."""


class ClosureStep:
    """A step with a closure outside ``Amp.step`` that continues when an evaluation gives a non-finite gradient.

    The closure is evaluated again if a smaller loss scale may help. If nothing helped, the rest of the step gets no
    gradients and evaluates nothing, and :meth:`end` undoes what the step did meanwhile.

    Args:
        optimizer: The optimizer that steps, before its step.
        closure: The closure that it evaluates.
        guard: Returns the guard of the optimizer; None until the optimizer is prepared, which the closure itself may
            do.
        keep: Whether the step may evaluate more than once, so that it may have updated something before it fails.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        guard: Callable[[], Guard | None],
        *,
        keep: bool,
    ) -> None:
        self._optimizer, self._closure, self._guard, self._keep = optimizer, closure, guard, keep
        self._snapshot = Snapshot(optimizer) if keep else None
        self._params = stored(optimizer)
        self._loss: Any = None
        """The last finite loss, else the first: a line search uses these numbers."""
        self.failed = False
        """Whether the rest of the step gets no gradients."""

    def evaluate(self) -> Any:
        """The function that the optimizer calls as its closure."""
        tries, scale = 0, None
        while not self.failed:
            guard = self._guard()
            before = {id(p): weakref.ref(p.grad) for p in self._params if self._keep and p.grad is not None}
            with contextlib.nullcontext() if guard is None else guard.evaluating():
                loss = self._closure()
            self._loss = loss if self._loss is None else self._loss
            guard = self._guard()
            if guard is None:
                return loss
            again = self._keep and tries < guard.tries and not self._adds_to(before) and _is_finite(loss)
            if again and scale is None:
                scale = guard.scale()
            try:
                bad = guard.look_at_evaluation(self._optimizer, again=again, zeros=self._keep)
            except BaseException:  # raises before anything has changed
                self.failed = True
                self.end()
                raise
            if not bad:
                self._loss = loss
                return loss
            self.failed, tries = not again, tries + 1
            if (
                self.failed and scale is not None
            ):  # no smaller scale helps, so the scale falls once, as after any step
                guard.put_back_scale(scale)
        return self._loss

    def _adds_to(self, before: Mapping[int, weakref.ref[torch.Tensor]]) -> bool:
        """Whether the closure added to existing gradients, which another evaluation would not recompute."""
        return any(id(p) in before and p.grad is not None and before[id(p)]() is p.grad for p in self._params)

    def end(self) -> None:
        """End the step; restore everything if it failed."""
        if self.failed and self._snapshot is not None:
            self._snapshot.restore()
            if (guard := self._guard()) is not None:
                guard.sync(self._optimizer)


def _is_finite(loss: Any) -> bool:
    """Whether a loss, or each of several, is finite; True if the closure returned none."""
    if isinstance(loss, float):
        return math.isfinite(loss)
    return all(bool(one.detach().isfinite().all()) for one in tensors_in(loss))
