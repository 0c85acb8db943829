"""Gradients that hold a loss scale: which parameters they lie on, and until when."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch

from castwise.core import _torch
from castwise.core.scaler import gradients


class Held:
    """Parameters on which scaled gradients lie, and what those looked like after the backward that left them.

    A parameter stays in until its gradient is cleared, whatever gradient lies there: what replaces a scaled gradient is made
    of it as a rule. Clearing by ``zero_grad`` is told by :meth:`release`. Setting every ``.grad`` to None by hand is noticed
    when the last gradient dies while no other parameter has one; a gradient that replaces another is there before that dies.
    For a single parameter this cannot be told, and it stays in.

    Args:
        params: The model's parameters, not their masters.
        grads: Theirs, in the same order.
    """

    __slots__ = ("__weakref__", "_ids", "_versions", "_watched", "params")

    def __init__(self, params: list[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
        self.params = params
        self._ids = [*map(id, grads)]
        self._versions = _torch.tensors.versions(grads)
        """How often each gradient had been written to; -1 where none lies that holds the scale."""
        self._watched: weakref.ref[torch.Tensor] | None = None
        for place in range(len(grads) - 1, -1, -1):
            grad = grads[place]
            if grad is not None:
                self._watch(place, grad)
                break

    def owned(self) -> list[torch.Tensor]:
        """The parameters whose gradients hold the scale."""
        return [
            parameter
            for parameter, version in zip(self.params, self._versions, strict=True)
            if version >= 0 and parameter.grad is not None
        ]

    def holds(self) -> bool:
        """Whether there is one."""
        for parameter, version in zip(self.params, self._versions, strict=True):
            if version >= 0 and parameter.grad is not None:
                return True
        return False

    def release(self, params: Collection[int]) -> None:
        """The gradients of these parameters, given by ``id``, are cleared now, or hold no scale any more."""
        self._versions = [
            -1 if id(parameter) in params else version
            for parameter, version in zip(self.params, self._versions, strict=True)
        ]

    def end(self) -> None:
        """All gradients are cleared now, or hold no scale any more."""
        self._versions = [-1] * len(self.params)
        self._watched = None

    def _changed(self) -> list[tuple[bool, torch.Tensor]]:
        """The gradients that are not as they were, and of each whether it is another one."""
        now = [parameter.grad for parameter in self.params]
        as_they_were = zip(self._ids, self._versions, strict=True)
        return [
            (id(grad) != key, grad)
            for grad, version, (key, was) in zip(now, _torch.tensors.versions(now), as_they_were, strict=True)
            if grad is not None and was >= 0 and (id(grad) != key or version != was)
        ]

    def were_replaced(self) -> bool:
        """Whether other gradients lie on all of the parameters than those that were left there."""
        changed = self._changed()
        return len(changed) == len(self.owned()) and all(another for another, _ in changed)

    def were_changed(self) -> bool:
        """Whether the gradients were clipped, or changed in a way that looks like it. Waits for the device where they were."""
        changed = self._changed()
        if not changed or len(changed) < min(2, sum(version >= 0 for version in self._versions)):
            return False
        return any(bool(gradients.values(grad).any()) for _, grad in changed)  # zeros are at any scale

    # --- gradients that die -----------------------------------------------------------------------------------

    def _watch(self, place: int, grad: torch.Tensor) -> None:
        alive = weakref.ref(self)

        def gone(_: object) -> None:
            this = alive()
            if this is not None:
                this._after_death(place)

        self._watched = weakref.ref(grad, gone)

    def _after_death(self, place: int) -> None:
        """The gradient at a place is being destroyed: it must not be read there, which would bring it back half destroyed."""
        if _torch.autograd.graph_task_id() != -1:
            return  # a backward writes to gradients from threads of its own
        dead = self._ids[place]
        others = [
            other
            for other in range(len(self.params) - 1, -1, -1)
            if self._versions[other] >= 0 and other != place and self._ids[other] != dead
        ]
        for other in others:
            grad = self.params[other].grad
            if grad is not None:
                self._watch(other, grad)
                return
        if others:  # a single parameter leaves open what became of its gradient
            self.end()
