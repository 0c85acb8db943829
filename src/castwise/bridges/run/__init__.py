"""Run unmodified scripts under a plan: ``castwise run --plan bf16-mixed train.py ...``.

:mod:`~castwise.bridges.run.execute` runs a script as Python would; :mod:`~castwise.bridges.run.follow` detects from the
outside what the script trains: models when they are called, optimizers when they are made, backward passes when they
reach torch's engine.
``castwise try`` races plans on a script's first steps: :mod:`~castwise.bridges.run.race` starts the script under each
plan, :mod:`~castwise.bridges.run.gate` pauses it between its turns.
"""

from __future__ import annotations

from castwise.bridges.run.execute import check, execute
from castwise.bridges.run.follow import Follower
from castwise.bridges.run.gate import EnoughError, Gate
from castwise.bridges.run.race import PLANS, Tried, TryResult, try_script

__all__ = ["PLANS", "EnoughError", "Follower", "Gate", "Tried", "TryResult", "check", "execute", "try_script"]
