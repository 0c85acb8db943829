"""Define :class:`Fate`, the reason why a search did not choose a plan, as it is recorded where it is decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["unsound", "failed", "worse", "spared", "untried", "late"]


@dataclass(frozen=True)
class Fate:
    """Why a plan was not chosen.

    Attributes:
        kind: One of six reasons. ``unsound``: its gradients, updates or training fail. ``failed``: it cannot run. ``worse``: it
            is slower or heavier, or no better than a simpler plan. ``spared``: nothing is wrong with it, but an equally good
            plan, or the same plan with other settings, was continued instead. ``untried``: nothing is known about it. ``late``:
            untried because the time ran out, so a longer budget would help.
        reason: The reason, as a clause.
        stage: The stage of the search in which the plan was dropped.
    """

    kind: Kind
    reason: str
    stage: str = field(default="", compare=False)

    @property
    def refused(self) -> bool:
        """Whether the plan cannot be chosen at any speed."""
        return self.kind in ("unsound", "failed")

    @property
    def unknown(self) -> bool:
        """Whether nothing is known about the plan."""
        return self.kind in ("untried", "late")
