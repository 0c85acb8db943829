"""Integrates castwise into Lightning: a precision plug-in makes a ``Trainer`` or a ``Fabric`` train under a castwise plan.

A Trainer's model is prepared when its strategy sets up the model, together with the optimizers from ``configure_optimizers``.
The model is restored when the Trainer tears down.

Fabric passes only modules to a precision plug-in, but fp32 master weights belong to the optimizers. This package therefore
patches ``Fabric.setup``, ``setup_module`` and ``setup_optimizers`` to pass both to a :class:`CastwisePrecision`. Other plug-ins
are unaffected.
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
