"""Drop-ins: scripts written for other libraries run on castwise, by its public names alone.

``apex``: ``apex.amp`` and the parts of Apex that scripts import along with it. ``colossalai``: Colossal-AI's AMP with
its engine and trainer. ``coverage``: which names they have, from each ``coverage.toml``. ``devices``: supported
devices. ``installing``: ``import apex`` and ``import colossalai`` from castwise.
"""

from __future__ import annotations

__all__ = ["install", "uninstall"]

from castwise.bridges.compat.installing import install, uninstall
