"""Communication between the processes of a training.

``group``: the processes that act together, and actions that all or none complete. ``agreement``: whether gradients are finite,
and their norm. ``waiting``: messages that name missing ranks. ``pieces``: which parameters are sharded, and into how many
pieces. ``plans``: ranks that were given different plans.
"""

from __future__ import annotations

from castwise.core.ranks.agreement import Agreement
from castwise.core.ranks.group import ALONE, Ranks
from castwise.core.ranks.pieces import Pieces

__all__ = ["ALONE", "Agreement", "Pieces", "Ranks"]
