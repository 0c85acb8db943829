"""``colossalai.core``: the context of this process, usually imported as ``global_context as gpc``."""

from __future__ import annotations

from castwise.bridges.compat.colossalai.context import ParallelContext

__all__ = ["global_context"]

global_context = ParallelContext()
