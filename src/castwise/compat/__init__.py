"""Drop-ins: scripts that were written for other libraries run on castwise.

``apex``: ``apex.amp`` and what scripts import along with it. ``colossalai``: Colossal-AI's AMP and the frame around it.
``coverage``: how a drop-in says which names it has.
"""

from __future__ import annotations

import importlib

__all__ = ["install"]

_DROP_INS = ("colossalai",)


def install() -> tuple[str, ...]:
    """Serve the original import lines (``from colossalai.amp import AMP_TYPE``) from castwise.

    Call it before them, once per process. A package that is really installed is never replaced.

    Returns:
        The packages that castwise serves from now on.
    """
    modules = {name: importlib.import_module(f"castwise.compat.{name}.serving") for name in _DROP_INS}
    return tuple(name for name, module in modules.items() if module.serve())
