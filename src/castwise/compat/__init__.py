"""Drop-ins: scripts that were written for other libraries run on castwise.

``apex``: ``apex.amp`` and what scripts import along with it. ``coverage``: how a drop-in says which names it has.
"""

from __future__ import annotations
