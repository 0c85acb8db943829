"""Undo a step of an optimizer that evaluates the loss itself, such as LBFGS, if a gradient is not finite.

There are two ways. :func:`step_or_restore` is used if castwise calls the step. :class:`ClosureStep` is used if the
user's script calls the step, which then cannot be interrupted.
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
    """Raised inside a step if the closure has computed a non-finite gradient, so that the step is undone."""


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
    """Holds copies of an optimizer's parameters, state and options, so that a step can be undone.

    Everything is copied, which takes time and memory, so this is used only for steps with a closure.
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
        """Restore the optimizer's parameters, state and options. Parameters and options that are tensors change in place."""
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
    """Make a step with a closure, and undo it as soon as the closure has computed a non-finite gradient.

    Args:
        optimizer: The optimizer to step.
        closure: The closure that computes the loss and its gradients.
        look: A function that is called after each call of the closure. It unscales the gradients and returns flags that
            are above zero if a gradient is not finite.
        args: Arguments of ``optimizer.step`` after the closure.
        kwargs: Keyword arguments of ``optimizer.step``.

    Returns:
        What ``optimizer.step`` returned, or None if the step was undone; and whether it was undone.
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
    """The interface that :class:`ClosureStep` needs of an object that guards steps outside ``Amp.step``.

    :class:`~castwise.core.scaler.watch.Watch` implements it.
    """

    tries: int
    """How often a closure may be called again, at half the loss scale each time."""

    def scale(self) -> torch.Tensor:
        """Return a copy of the loss scale, a 0-dim tensor."""

    def put_back_scale(self, scale: torch.Tensor) -> None:
        """Set the loss scale back to a value that :meth:`scale` returned."""

    def evaluating(self) -> AbstractContextManager[object]:
        """Return a context manager for the time in which a closure runs.

        Gradients of other optimizers that are cleared inside do not count as skipped steps.
        """

    def look_at_evaluation(self, optimizer: Optimizer, *, again: bool, zeros: bool) -> bool:
        """Check the gradients of an optimizer after its closure ran, and remove all of them if one is not finite.

        Args:
            optimizer: The optimizer.
            again: Whether the closure will be called once more if a gradient is not finite.
            zeros: Whether to replace the gradients by zeros instead of removing them, if the closure is not called
                again.

        Returns:
            Whether a gradient is not finite.
        """

    def sync(self, optimizer: Optimizer) -> None:
        """Copy an optimizer's fp32 masters into the model."""


class ClosureStep:
    """A step with a closure that the user's script makes, outside ``Amp.step``, and that is undone if gradients overflow.

    If the closure has computed a non-finite gradient, the closure is called again at a smaller loss scale, if that may
    help. The step itself cannot be interrupted. So if nothing helps, the step gets no gradients any more, its calls of
    the closure do nothing, and :meth:`end` undoes what the step did.

    Args:
        optimizer: The optimizer that is about to step.
        closure: The closure that was given to the optimizer.
        guard: A function that returns the object that guards the optimizer's steps. It returns None until the optimizer
            is prepared, which the closure itself may do.
        keep: Whether the optimizer may call the closure more than once, so that it may have updated something before a
            gradient overflows.
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
        """The last loss with finite gradients, or else the first loss. A line search in the optimizer uses these values."""
        self.failed = False
        """Whether a gradient was not finite and nothing helped, so that the step gets no gradients any more."""

    def evaluate(self) -> Any:
        """Call the closure, check the gradients, and return the loss. The optimizer calls this in place of its closure."""
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
            except BaseException:  # the guard raised, and has changed nothing before
                self.failed = True
                self.end()
                raise
            if not bad:
                self._loss = loss
                return loss
            self.failed, tries = not again, tries + 1
            if (
                self.failed and scale is not None
            ):  # smaller scales did not help, so undo all reductions but one, as after any skipped step
                guard.put_back_scale(scale)
        return self._loss

    def _adds_to(self, before: Mapping[int, weakref.ref[torch.Tensor]]) -> bool:
        """Whether the closure added to existing gradients, so that calling it again would not compute them anew.

        ``before`` holds the gradients before the closure was called, by the ``id`` of the parameter.
        """
        return any(id(p) in before and p.grad is not None and before[id(p)]() is p.grad for p in self._params)

    def end(self) -> None:
        """Undo the step if a gradient was not finite and nothing helped."""
        if self.failed and self._snapshot is not None:
            self._snapshot.restore()
            if (guard := self._guard()) is not None:
                guard.sync(self._optimizer)


def _is_finite(loss: Any) -> bool:
    """Whether all losses that a closure returned are finite. True if it returned none."""
    if isinstance(loss, float):
        return math.isfinite(loss)
    return all(bool(one.detach().isfinite().all()) for one in tensors_in(loss))
