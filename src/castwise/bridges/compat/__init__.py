"""Drop-ins: scripts that were written for other libraries run on castwise, by its public names alone.

``apex``: ``apex.amp`` and what scripts import along with it. ``colossalai``: Colossal-AI's AMP and the frame around
it. ``coverage``: which names they have, by the ``coverage.toml`` of each. ``devices``: where they run. ``installing``:
``import apex`` and ``import colossalai`` from castwise.
"""

from __future__ import annotations

__all__ = ["install", "uninstall"]

from castwise.bridges.compat.installing import install, uninstall
