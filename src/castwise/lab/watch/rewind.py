"""The batches of a training since its last good states, to be handed out again."""

from __future__ import annotations

from typing import NamedTuple

from castwise.lab.watch.moments import Moment


class _Kept(NamedTuple):
    moment: Moment
    step: int


class Rewind:
    """Batches in the order of the data, each with the step that it belongs to, and a cursor that can go back.

    Args:
        keep_bytes: Of batches; of larger ones those of the earliest steps are let go, but for the step that is on its way.

    Attributes:
        cursor: How many batches lie before the next one.
        base: How many were handed out before the first that is kept.
        passed: Steps that are passed over.
        spoilt: Steps with batches that were changed since, which are passed over too.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._kept: list[_Kept] = []
        self._bytes = 0
        self._next_step = 0
        self.cursor = self.base = 0
        self.passed: set[int] = set()
        self.spoilt: set[int] = set()

    @property
    def step(self) -> int:
        """That the next batch belongs to."""
        at = self.cursor - self.base
        return self._kept[at].step if at < len(self._kept) else self._next_step

    def again(self) -> Moment | None:
        """The next batch, if it is one of those that are kept; else a new one is wanted."""
        at = self.cursor - self.base
        return self._kept[at].moment if at < len(self._kept) else None

    def pass_over(self) -> None:
        """Go past batches that are not wanted again."""
        while self.again() is not None and self.step in self.passed | self.spoilt:
            self.cursor += 1

    def changed(self) -> set[int]:
        """Steps with batches that were changed since they were handed out."""
        return {one.step for one in self._kept if one.moment.changed}

    def keep(self, moment: Moment, oldest: int) -> None:
        """Take in a new batch; those before ``oldest``, which no good state goes back to, are let go."""
        self._kept.append(_Kept(moment, self._next_step))
        self._bytes += moment.nbytes
        count = 0
        last = -1
        for first in self._kept:
            enough = self._bytes <= self._keep_bytes and self.base + count >= oldest
            if first.step == self._next_step or (enough and first.step != last):  # a step goes whole
                break
            self._bytes -= first.moment.nbytes
            count, last = count + 1, first.step
        del self._kept[:count]
        self.base += count

    def end_step(self, step: int) -> None:
        """The step is over: a new batch belongs to a later one."""
        self._next_step = max(self._next_step, step + 1)

    def moments_of(self, step: int) -> list[Moment]:
        """The batches of a step that are kept."""
        return [one.moment for one in self._kept if one.step == step]

    def clear(self) -> None:
        """Let go of all."""
        self._kept, self._bytes = [], 0
        self.base = self.cursor
