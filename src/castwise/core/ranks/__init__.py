"""Communicate between the processes (ranks) of a training run.

- ``group`` runs actions that either all ranks of a process group complete or none does.
- ``agreement`` makes ranks agree on whether gradients are finite, and computes the norm of the gradients of all ranks.
- ``waiting`` names the missing ranks if a rank waits for long.
- ``pieces`` knows which parameters are sharded, and into how many pieces.
- ``plans`` checks that all ranks have the same plan.
"""

from __future__ import annotations

from castwise.core.ranks.agreement import Agreement
from castwise.core.ranks.group import ALONE, Ranks
from castwise.core.ranks.pieces import Pieces

__all__ = ["ALONE", "Agreement", "Pieces", "Ranks"]
