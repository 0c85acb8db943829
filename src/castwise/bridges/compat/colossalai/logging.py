"""``colossalai.logging``: a logger that can log on chosen ranks only."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from castwise.bridges.compat.colossalai.context import ParallelMode
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.bridges.compat.coverage import missing_attribute

__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]
__getattr__ = missing_attribute("colossalai.logging")

_loggers: dict[str, DistributedLogger] = {}


class _Stderr(logging.StreamHandler[Any]):
    """A log handler that writes to the current ``sys.stderr``, so that messages follow a redirection of ``sys.stderr``."""

    stream = property(lambda self: sys.stderr, lambda self, value: None)


class DistributedLogger:
    """Logs on all ranks, or on the ranks given with a message, through a logger of :mod:`logging`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._format = logging.Formatter("%(name)s - %(asctime)s %(levelname)s: %(message)s")
        if not self._logger.handlers:
            handler = _Stderr()
            handler.setFormatter(self._format)
            self._logger.addHandler(handler)
            self._logger.setLevel(logging.INFO)
            self._logger.propagate = False

    @staticmethod
    def get_instance(name: str) -> DistributedLogger:
        """Return the logger of a name, which is created at its first use."""
        return get_dist_logger(name)

    def set_level(self, level: str) -> None:
        """Set the level by name: DEBUG, INFO, WARNING, ERROR."""
        self._logger.setLevel(level)

    def log_to_file(self, path: str, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Write messages to the file ``path/rank_<n>[_suffix].log`` too. The folder is created if it does not exist."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{gpc.get_global_rank()}" + (f"_{suffix}" if suffix else "")
        handler = logging.FileHandler(folder / f"{name}.log", mode)
        handler.setLevel(level)
        handler.setFormatter(self._format)
        self._logger.addHandler(handler)

    def _log(
        self,
        level: int,
        message: str,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Log a message on the given ranks of the group ``parallel_mode``, by default on all ranks."""
        is_global = parallel_mode is ParallelMode.GLOBAL
        rank = gpc.get_global_rank() if is_global else gpc.get_local_rank(parallel_mode)
        if ranks is None or rank in ranks:
            self._logger.log(level, message)

    debug = functools.partialmethod(_log, logging.DEBUG)
    info = functools.partialmethod(_log, logging.INFO)
    warning = functools.partialmethod(_log, logging.WARNING)
    error = functools.partialmethod(_log, logging.ERROR)


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """Return the logger of a name. The same name always returns the same object."""
    return _loggers.setdefault(name, DistributedLogger(name))


def disable_existing_loggers(include: list[str] | None = None, exclude: list[str] | None = None) -> None:
    """Set all loggers, or those named in ``include``, to level WARNING.

    The loggers named in ``exclude`` are left unchanged. By default this is the logger ``colossalai``.
    """
    kept = ["colossalai"] if exclude is None else exclude
    for name in include if include is not None else list(logging.root.manager.loggerDict):
        if name not in kept:
            logging.getLogger(name).setLevel(logging.WARNING)
