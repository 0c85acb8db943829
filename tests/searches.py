"""Make the searches of tests short."""

from __future__ import annotations

import pytest

from castwise.lab.search import decision, final, starts


def short_finals(patch: pytest.MonkeyPatch, most: int = 1) -> None:
    """Limit the finals of searches to a few starts of three rounds; more are tested in test_decision.py and test_final.py."""
    patch.setattr(decision, "LEAST", min(most, decision.LEAST))
    patch.setattr(decision, "MOST", most)
    for module in (starts, final):
        patch.setattr(module, "ROUNDS", 3)
