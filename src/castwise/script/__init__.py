"""Scripts of others, run as they are under a plan: ``castwise run --plan bf16-mixed train.py ...``.

:mod:`~castwise.script.execute` runs a script as Python would; :mod:`~castwise.script.follow` sees what it trains, and how, from
the outside: models when they are called, optimizers when they are made, backward passes when they reach torch's engine.
"""

from __future__ import annotations

from castwise.script.execute import check, execute
from castwise.script.follow import Follower

__all__ = ["Follower", "check", "execute"]
