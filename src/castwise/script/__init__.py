"""Scripts of others, run as they are under a plan: ``castwise run --plan bf16-mixed train.py ...``.

:mod:`~castwise.script.execute` runs a script as Python would; :mod:`~castwise.script.follow` sees what it trains, and how, from
the outside: models when they are called, optimizers when they are made, backward passes when they reach torch's engine.
``castwise try`` races plans on a script's first steps: :mod:`~castwise.script.race` starts it under each,
:mod:`~castwise.script.gate` has it wait for its turn.
"""

from __future__ import annotations

from castwise.script.execute import check, execute
from castwise.script.follow import Follower
from castwise.script.gate import EnoughError, Gate
from castwise.script.race import PLANS, Tried, TryResult, try_script

__all__ = ["PLANS", "EnoughError", "Follower", "Gate", "Tried", "TryResult", "check", "execute", "try_script"]
