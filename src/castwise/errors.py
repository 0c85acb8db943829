"""Exception types of castwise.

Each is a subclass of :class:`CastwiseError` and of the builtin that a caller would expect, so that both
``except castwise.CastwiseError`` and ``except ValueError`` do what they say.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = [
    "BannedOperatorError",
    "CastwiseError",
    "CheckpointError",
    "DeviceError",
    "DivergedError",
    "LintError",
    "LossScaleError",
    "MigrateError",
    "MissingLibraryError",
    "NonFiniteError",
    "PatternError",
    "PlanError",
    "RankError",
    "StateError",
    "UnknownNameError",
    "WorkloadError",
]


class CastwiseError(Exception):
    """Root of every error that castwise raises on purpose."""


class PlanError(CastwiseError, ValueError):
    """A plan, or a part of one, is not valid: the message names the field, the value and the allowed values."""


class UnknownNameError(PlanError):
    """A preset, format, operator or field name that does not exist."""


class PatternError(PlanError):
    """A region pattern that matches nothing, or only modules whose forward never runs."""


class DeviceError(CastwiseError, RuntimeError):
    """The device does not support the plan."""


class BannedOperatorError(CastwiseError, NotImplementedError):
    """An operator ran that the plan's rules ban, as binary_cross_entropy in fp16."""


class StateError(CastwiseError, RuntimeError):
    """A valid call was made at the wrong time or in the wrong order."""


class RankError(CastwiseError, RuntimeError):
    """Something failed on some ranks of a process group; every rank raises it.

    Attributes:
        reason: A clause that names the failure and the ranks.
        cannot_run: Whether every failure means that the plan cannot run on that rank; if False, some failure is a fault
            of the code.
    """

    def __init__(self, message: str, *, reason: str = "", cannot_run: bool = False) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.cannot_run = cannot_run


class LossScaleError(CastwiseError, RuntimeError):
    """Gradients still overflow although the loss scale is at its floor."""


class NonFiniteError(CastwiseError, ArithmeticError):
    """A loss or a gradient is NaN or infinite, and no loss scale can cure it."""


class DivergedError(CastwiseError, ArithmeticError):
    """A training diverged again and again, and going back to a good state did not help."""


class WorkloadError(CastwiseError, ValueError):
    """A workload could not be found, imported or run."""


class LintError(CastwiseError, ValueError):
    """A script or folder could not be checked."""


class MigrateError(CastwiseError, ValueError):
    """A script or folder could not be migrated."""


class MissingLibraryError(CastwiseError, ImportError):
    """A library of one of the package's extras is not installed; the message says how to install it."""


class CheckpointError(CastwiseError, ValueError):
    """A saved state is damaged, or does not fit the training."""


def sentence(error: BaseException, whole: bool = True) -> str:
    """An exception's message on one line: the whole message, or only its first line.

    castwise's own are sentences already, others get the name of their type.
    """
    said = str(error).strip()
    text = " ".join(said.split() if whole else said.splitlines()[:1]).strip()
    name = "" if isinstance(error, CastwiseError) else type(error).__name__
    return ": ".join(part for part in (name, text) if part)


_OWN = str(Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_users(file: str) -> bool:
    """Whether a Python file is the user's own, and not part of castwise or of an installed library."""
    return not file.startswith((_OWN, *_LIBRARIES, "<frozen"))


class Elsewhere(Exception):
    """The cause of an error that another process raised: its traceback there.

    Attributes:
        place: The result of :func:`place` in that process.
    """

    def __init__(self, trace: str, place: str) -> None:
        super().__init__(f"in another process:\n{trace}")
        self.place = place


def place(error: BaseException) -> str:
    """The innermost line of a user's own code that an error came through, as ``job.py, line 3, in loss``.

    Empty where, since castwise caught it, it has come through none; in a process that castwise started counts too.
    """
    if isinstance(error.__cause__, Elsewhere):
        return error.__cause__.place
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    return ""


def told(error: BaseException, whole: bool = True) -> str:
    """:func:`sentence`, followed by :func:`place` in parentheses if there is a place and castwise did not raise the exception."""
    where = "" if isinstance(error, CastwiseError) else place(error)
    return sentence(error, whole) + (f" ({where})" if where else "")


def check_count(call: str, name: str, value: object, least: int) -> None:
    """Refuse an argument that is not a whole number of at least ``least``.

    Raises:
        PlanError: The argument is no such number; the error names the call, the argument and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{call}({name}={value!r}): needs a whole number >= {least}")
