"""Name ranks in messages."""

from __future__ import annotations

from collections.abc import Sequence

from castwise.core.plans.text import some


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text for a message, such as ``rank 1`` or ``ranks 2, 3``."""
    return f"rank{'s' * (len(ranks) > 1)} {some([*map(str, ranks)], 8)}"
