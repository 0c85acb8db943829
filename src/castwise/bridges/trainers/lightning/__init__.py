"""Lightning: a plan as the precision plug-in of a ``Trainer`` or a ``Fabric``.

A Trainer's model is prepared when its strategy sets it up, with the optimizers that ``configure_optimizers`` made, and is as it was
when the Trainer tears down. Fabric tells a plug-in of modules alone, and masters live in optimizers; so ``Fabric.setup``,
``setup_module`` and ``setup_optimizers`` are extended here to tell a :class:`CastwisePrecision` of both. Every other plug-in gets what
it always got.
"""

from __future__ import annotations

try:
    import lightning  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "castwise.integrations.lightning needs Lightning, which is not installed: pip install 'castwise[lightning]'",
        name=error.name,
    ) from error

from castwise.bridges.trainers.lightning.entry import StrategyError, install
from castwise.bridges.trainers.lightning.precision import CastwisePrecision

__all__ = ["CastwisePrecision", "StrategyError"]

install()
