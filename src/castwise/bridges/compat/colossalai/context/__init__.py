"""``colossalai.context``: the configuration, the kinds of parallelism, and the process's ranks and groups."""

from __future__ import annotations

from castwise.bridges.compat.colossalai.context.config import Config, ConfigException
from castwise.bridges.compat.colossalai.context.parallel_context import ParallelContext
from castwise.bridges.compat.colossalai.context.parallel_mode import ParallelMode
from castwise.bridges.compat.coverage import missing_attribute

__all__ = ["Config", "ConfigException", "ParallelContext", "ParallelMode"]
__getattr__ = missing_attribute("colossalai.context")
