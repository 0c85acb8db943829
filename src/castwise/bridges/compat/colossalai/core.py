"""``colossalai.core``: the global :class:`ParallelContext` of this process, which scripts import as ``gpc``."""

from __future__ import annotations

from castwise.bridges.compat.colossalai.context import ParallelContext

__all__ = ["global_context"]

global_context = ParallelContext()
