"""Keep track of which gradients are multiplied by the loss scale, until they are cleared or unscaled."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch

from castwise.core import _torch
from castwise.core.scaler import gradients


class Held:
    """Records which parameters have gradients that are multiplied by the loss scale, and whether these change later.

    A parameter stays recorded until its gradient is cleared. If the gradient is replaced by another tensor, the
    parameter stays recorded too, since the new gradient is usually computed from the scaled one. :meth:`release`
    records that ``zero_grad`` clears gradients. If the user's code sets every ``.grad`` to None instead, this class
    notices it: the last gradient is freed while no other parameter has one. If gradients were replaced, a new one would
    be set before the old one is freed. With a single parameter the two cases cannot be told apart, so it stays
    recorded.

    Args:
        params: The model's parameters, not their masters.
        grads: Their gradients, in the same order.
    """

    __slots__ = ("__weakref__", "_ids", "_versions", "_watched", "params")

    def __init__(self, params: list[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
        self.params = params
        self._ids = [*map(id, grads)]
        self._versions = _torch.tensors.versions(grads)
        """The version of each gradient after the backward pass; -1 if the gradient is not multiplied by the scale."""
        self._watched: weakref.ref[torch.Tensor] | None = None
        for place in range(len(grads) - 1, -1, -1):
            grad = grads[place]
            if grad is not None:
                self._watch(place, grad)
                break

    def owned(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients are multiplied by the scale."""
        return [
            parameter
            for parameter, version in zip(self.params, self._versions, strict=True)
            if version >= 0 and parameter.grad is not None
        ]

    def holds(self) -> bool:
        """Whether the gradient of any parameter is multiplied by the scale."""
        for parameter, version in zip(self.params, self._versions, strict=True):
            if version >= 0 and parameter.grad is not None:
                return True
        return False

    def release(self, params: Collection[int]) -> None:
        """Record that the gradients of these parameters, given by ``id``, were cleared or unscaled."""
        self._versions = [
            -1 if id(parameter) in params else version
            for parameter, version in zip(self.params, self._versions, strict=True)
        ]

    def end(self) -> None:
        """Record that all gradients were cleared or unscaled."""
        self._versions = [-1] * len(self.params)
        self._watched = None

    def _changed(self) -> list[tuple[bool, torch.Tensor]]:
        """Return the gradients that changed since the backward pass, each with whether another tensor has replaced it."""
        now = [parameter.grad for parameter in self.params]
        as_they_were = zip(self._ids, self._versions, strict=True)
        return [
            (id(grad) != key, grad)
            for grad, version, (key, was) in zip(now, _torch.tensors.versions(now), as_they_were, strict=True)
            if grad is not None and was >= 0 and (id(grad) != key or version != was)
        ]

    def were_replaced(self) -> bool:
        """Whether the gradient of every recorded parameter is another tensor than the backward pass left."""
        changed = self._changed()
        return len(changed) == len(self.owned()) and all(another for another, _ in changed)

    def were_changed(self) -> bool:
        """Whether the gradients were clipped, or changed in a similar way, since the backward pass.

        Clipping changes every gradient, so a change of only one of several does not count. Waits for the device if
        gradients changed.
        """
        changed = self._changed()
        if not changed or len(changed) < min(2, sum(version >= 0 for version in self._versions)):
            return False
        return any(
            bool(gradients.values(grad).any()) for _, grad in changed
        )  # gradients set to zero are right at any scale

    # --- gradients that are freed -----------------------------------------------------------------------------

    def _watch(self, place: int, grad: torch.Tensor) -> None:
        alive = weakref.ref(self)

        def gone(_: object) -> None:
            this = alive()
            if this is not None:
                this._after_death(place)

        self._watched = weakref.ref(grad, gone)

    def _after_death(self, place: int) -> None:
        """Find out whether all gradients were set to None, when the gradient of the parameter at ``place`` is freed.

        The freed gradient must not be read here, since that would revive a half-destroyed object.
        """
        if _torch.autograd.graph_task_id() != -1:
            return  # during a backward pass, other threads write gradients
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
        if others:  # for a single parameter it is unknown whether the gradient was cleared or replaced
            self.end()
