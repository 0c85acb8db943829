"""What becomes of the plans of a search, noted where it is decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["unsound", "failed", "worse", "spared", "untried", "late"]


@dataclass(frozen=True)
class Fate:
    """Why a plan is not the answer.

    Attributes:
        kind: ``unsound``: its gradients, its updates or its training speak against it. ``failed``: it cannot run. ``worse``: slower
            or heavier, or no better than a simpler one. ``spared``: nothing speaks against it, and another as good went on, or
            the same with other settings. ``untried``: nothing is known of it. ``late``: nor is there since the time was spent,
            so that a longer budget would tell.
        reason: Why, in a clause.
        stage: Of the search, in which it was decided.
    """

    kind: Kind
    reason: str
    stage: str = field(default="", compare=False)

    @property
    def refused(self) -> bool:
        """Whether the plan cannot be chosen, however fast it is."""
        return self.kind in ("unsound", "failed")

    @property
    def unknown(self) -> bool:
        """Whether nothing is known of the plan."""
        return self.kind in ("untried", "late")
