"""Decide when a recovery should give up: count its returns without progress, and the batches that it skipped."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from castwise.lab.watch.losses import PERSISTENT

MOST = 24
"""Number of steps that may be skipped within ``WITHIN`` steps. More skips are not chance: the data or the learning rate has
changed."""
WITHIN = 2400


@dataclass
class Progress:
    """Decides when another return to a good state is pointless.

    Attributes:
        attempts: Largest number of returns without progress.
        failed: Number of returns since the last progress. A return after which a batch is skipped counts as progress.
        furthest: The last step that diverged.
        skipped: The last steps whose batches were skipped after a return.
        updates: Steps that were skipped since the last progress because their update damaged the weights.
    """

    attempts: int
    failed: int = 0
    furthest: int = -1
    skipped: deque[int] = field(default_factory=lambda: deque(maxlen=MOST))
    updates: set[int] = field(default_factory=set)

    def diverged(self, first: int, last: int) -> None:
        """Record a divergence. If it comes well after all earlier divergences, it counts as having a new cause."""
        if first > self.furthest + PERSISTENT:
            self._start_again()
        self.furthest = max(self.furthest, first, last)

    def confirmed(self, step: int) -> None:
        """Record that a good state was saved before this step."""
        if step > self.furthest + 1:
            self._start_again()

    def _start_again(self) -> None:
        self.failed = 0
        self.updates.clear()

    def stuck(self, step: int) -> str:
        """Say in a clause why another return is pointless; empty if it is not."""
        if self.failed >= self.attempts:
            return f"going back {self.failed} time{'s' * (self.failed != 1)} did not help"
        if len(self.skipped) == MOST and step - self.skipped[0] < WITHIN:
            return f"the batches of {MOST} steps were already skipped since step {self.skipped[0]}"
        return ""
