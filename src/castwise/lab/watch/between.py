"""What a loop does between two passes over its data, done again where a recovery goes back to before it.

A scheduler steps once an epoch, an average is updated then: between two calls of ``batches``, where nobody sees the code that
does it. What it did is seen by what it changed, and is done again where the data of the pass before ends.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from castwise.core.checkpoint.storage import local_of


class _Look(NamedTuple):
    """Copies of states by name, and of each optimizer's options by group."""

    also: dict[str, Any]
    options: list[list[dict[str, Any]]]


class _Break(NamedTuple):
    """What changed between two passes, as it was then, and how many batches lie before."""

    cursor: int
    also: dict[str, Any]
    options: list[tuple[int, int, str, Any]]


class Breaks:
    """The breaks between passes that lie behind a training's good states.

    Args:
        optimizers: Whose options change.
        also: Objects with ``state_dict`` and ``load_state_dict``, by name.

    Attributes:
        count: How many breaks the training has behind it; fewer while it is on its way again.
    """

    def __init__(self, optimizers: Sequence[Optimizer], also: Mapping[str, Any]) -> None:
        self._optimizers, self._also = optimizers, also
        self._kept: list[_Break] = []
        self._let_go = 0
        self._left: _Look | None = None
        self._pass = 0
        self.count = 0

    def enter(self, cursor: int) -> int:
        """A pass begins behind so many batches; its number."""
        left, self._left = self._left, None
        self._pass += 1
        if left is not None:
            now = self._look()
            also = {name: state for name, state in now.also.items() if not _same(state, left.also[name])}
            options = [
                (at, number, key, value)
                for at, (groups, before) in enumerate(zip(now.options, left.options, strict=True))
                for number, (group, was) in enumerate(zip(groups, before, strict=False))
                for key, value in group.items()
                if key not in was or not _same(value, was[key])
            ]
            if also or options:
                self._kept.append(_Break(cursor, also, options))
                self.count += 1
        return self._pass

    def leave(self, number: int) -> None:
        """A pass has ended, or was broken off; nothing where another has begun since."""
        if number == self._pass:
            self.redo()  # what comes now comes after them
            self._left = self._look()

    def go_back(self, count: int) -> None:
        """The training has so many breaks behind it again."""
        self.count = count

    def redo(self, cursor: int | None = None) -> None:
        """Do again what lies before so many batches, or all that is to be done again."""
        while self.count < self._let_go + len(self._kept):
            one = self._kept[self.count - self._let_go]
            if cursor is not None and one.cursor > cursor:
                return
            for name, state in one.also.items():
                self._also[name].load_state_dict(copy.deepcopy(state))
            for at, number, key, value in one.options:
                groups = self._optimizers[at].param_groups
                if number < len(groups):
                    _set(groups[number], key, value)
            self.count += 1

    def forget_before(self, count: int) -> None:
        """Keep none of the first so many, before which nobody goes back."""
        del self._kept[: count - self._let_go]
        self._let_go = max(self._let_go, count)

    def _look(self) -> _Look:
        return _Look(
            {name: copy.deepcopy(thing.state_dict()) for name, thing in self._also.items()},
            [
                [
                    {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
                    for group in optimizer.param_groups
                ]
                for optimizer in self._optimizers
            ],
        )


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    held = group.get(key)
    if isinstance(held, Tensor) and isinstance(value, Tensor):
        with torch.no_grad():  # a learning rate that was captured in a graph stays the tensor that it is
            held.copy_(value)
    else:
        group[key] = copy.deepcopy(value)


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.dtype is other.dtype
            and torch.equal(local_of(one), local_of(other))
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
