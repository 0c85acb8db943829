"""Lightning: a plan as the precision plug-in of a ``Trainer`` or a ``Fabric``.

A Trainer's model is prepared when its strategy sets it up, with the optimizers from ``configure_optimizers``, and
restored when the Trainer tears down. Fabric passes only modules to a plug-in, but masters live in optimizers. So this
package extends ``Fabric.setup``, ``setup_module`` and ``setup_optimizers`` to pass both to a
:class:`CastwisePrecision`. Other plug-ins are unaffected.
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
