"""Communication between the processes of a training.

``group``: who acts together, and what all of them do or none. ``agreement``: whether gradients are finite, and their norm.
``waiting``: who has not come, in words. ``pieces``: which parameters are cut, and into how many. ``plans``: ranks that were given different plans.
"""

from __future__ import annotations

from castwise.core.ranks.agreement import Agreement
from castwise.core.ranks.group import ALONE, Ranks
from castwise.core.ranks.pieces import Pieces

__all__ = ["ALONE", "Agreement", "Pieces", "Ranks"]
