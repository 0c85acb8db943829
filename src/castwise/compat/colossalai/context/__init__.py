"""``colossalai.context``: the configuration, the kinds of parallelism, and the process's place in them."""

from __future__ import annotations

from castwise.compat.colossalai.context.config import Config, ConfigException
from castwise.compat.colossalai.context.parallel_context import ParallelContext
from castwise.compat.colossalai.context.parallel_mode import ParallelMode
from castwise.compat.coverage import missing_attribute

__all__ = ["Config", "ConfigException", "ParallelContext", "ParallelMode"]
__getattr__ = missing_attribute("colossalai.context")
