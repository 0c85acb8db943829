"""The ways in which executed statements leave the code around them."""

from __future__ import annotations

from castwise.bridges.scripts.lint.run.values import Value


class ReturnError(Exception):
    """``return``, with the returned value."""

    def __init__(self, value: Value) -> None:
        self.value = value


class BreakError(Exception):
    """``break``."""


class ContinueError(Exception):
    """``continue``."""


class RaiseError(Exception):
    """``raise``."""


class SpentError(Exception):
    """A run has executed as many statements as it may."""


LEAVES = (ReturnError, BreakError, ContinueError, RaiseError)
