"""Keep the batches since the last good states, so that they can be repeated."""

from __future__ import annotations

from typing import NamedTuple

from castwise.lab.watch.moments import Moment


class _Kept(NamedTuple):
    moment: Moment
    step: int


class Rewind:
    """The kept batches in data order, each with its step, and a cursor that can be moved back.

    Args:
        keep_bytes: Largest total size of the kept batches. If they would be larger, the earliest steps are discarded, but never
            the current step.

    Attributes:
        cursor: Number of batches before the next batch, counted from the first batch of the training.
        base: Number of batches before the first kept batch.
        passed: Steps to skip.
        spoilt: Steps with batches that were changed in place. They are skipped too.
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
        """The step to which the next batch belongs."""
        at = self.cursor - self.base
        return self._kept[at].step if at < len(self._kept) else self._next_step

    def again(self) -> Moment | None:
        """Return the next batch if it was kept; None if a new batch is needed."""
        at = self.cursor - self.base
        return self._kept[at].moment if at < len(self._kept) else None

    def pass_over(self) -> None:
        """Advance the cursor past the batches of skipped steps."""
        while self.again() is not None and self.step in self.passed | self.spoilt:
            self.cursor += 1

    def changed(self) -> set[int]:
        """Return the steps with batches that were changed in place after they were yielded."""
        return {one.step for one in self._kept if one.moment.changed}

    def keep(self, moment: Moment, oldest: int) -> None:
        """Append a new batch, and discard batches before ``oldest``, the position of the oldest good state."""
        self._kept.append(_Kept(moment, self._next_step))
        self._bytes += moment.nbytes
        count = 0
        last = -1
        for first in self._kept:
            enough = self._bytes <= self._keep_bytes and self.base + count >= oldest
            if first.step == self._next_step or (enough and first.step != last):  # discard only whole steps
                break
            self._bytes -= first.moment.nbytes
            count, last = count + 1, first.step
        del self._kept[:count]
        self.base += count

    def end_step(self, step: int) -> None:
        """End a step, so that the next new batch belongs to a later step."""
        self._next_step = max(self._next_step, step + 1)

    def moments_of(self, step: int) -> list[Moment]:
        """Return the kept batches of a step."""
        return [one.moment for one in self._kept if one.step == step]

    def forget_past(self) -> None:
        """Discard the batches before the cursor."""
        del self._kept[: self.cursor - self.base]
        self._bytes = sum(one.moment.nbytes for one in self._kept)
        self.base = self.cursor

    def clear(self) -> None:
        """Discard all batches."""
        self._kept, self._bytes = [], 0
        self.base = self.cursor
