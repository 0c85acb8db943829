"""Runs unmodified training scripts under a castwise plan: ``castwise run --plan bf16-mixed train.py ...``.

:mod:`~castwise.bridges.run.execute` runs a script as Python would. :mod:`~castwise.bridges.run.follow` detects what the script
trains, without changing the script: models when they are called, optimizers when they are made, and backward passes when they
reach torch's autograd engine.

``castwise try`` compares the speed of several plans on a script's first steps. :mod:`~castwise.bridges.run.race` starts the
script once under each plan, and :mod:`~castwise.bridges.run.gate` pauses each of these processes while another is timed.
"""

from __future__ import annotations

from castwise.bridges.run.execute import check, execute
from castwise.bridges.run.follow import Follower
from castwise.bridges.run.gate import EnoughError, Gate
from castwise.bridges.run.race import PLANS, Tried, TryResult, try_script

__all__ = ["PLANS", "EnoughError", "Follower", "Gate", "Tried", "TryResult", "check", "execute", "try_script"]
