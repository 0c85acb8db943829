"""Drop-ins: scripts that were written for other libraries run on castwise.

``apex``: ``apex.amp`` and what scripts import along with it. ``colossalai``: Colossal-AI's AMP and the frame around it. ``coverage``: how a drop-in says which names it has.
``installing``: ``import apex`` and ``import colossalai`` from castwise.
"""

from __future__ import annotations

__all__ = ["install", "uninstall"]

from castwise.compat.installing import install, uninstall
