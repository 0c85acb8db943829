"""Drop-ins: scripts that were written for other libraries run on castwise.

``apex``: ``apex.amp`` and what scripts import along with it. ``coverage``: how a drop-in says which names it has.
``installing``: ``import apex`` from castwise.
"""

from __future__ import annotations

__all__ = ["install", "uninstall"]

from castwise.compat.installing import install, uninstall
