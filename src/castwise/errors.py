"""The exception types of castwise, and functions that describe exceptions.

Each type is a subclass of :class:`CastwiseError` and of the builtin exception that a caller would expect. So both
``except castwise.CastwiseError`` and ``except ValueError`` work.
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
    """The base class of all errors that castwise raises.

    Each error is also an instance of the builtin exception that a caller would expect, such as ValueError.
    """


class PlanError(CastwiseError, ValueError):
    """A plan is invalid, or an argument has a value that is not allowed.

    The message names the field or the argument, the value and the allowed values.
    """


class UnknownNameError(PlanError):
    """A preset, format, operator or field with the given name does not exist."""


class PatternError(PlanError):
    """The pattern of a region matches no module, or only modules whose ``forward`` is never called.

    A region is a part of a model for which a plan sets a format of its own.
    """


class DeviceError(CastwiseError, RuntimeError):
    """The device does not exist, or it does not support the plan."""


class BannedOperatorError(CastwiseError, NotImplementedError):
    """An operator was called that the plan forbids, such as ``binary_cross_entropy`` in fp16."""


class StateError(CastwiseError, RuntimeError):
    """A method was called at the wrong time or in the wrong order, such as a step before the backward pass."""


class RankError(CastwiseError, RuntimeError):
    """An operation failed on some ranks of a process group. Every rank of the group raises this error.

    Attributes:
        reason: A clause that says what failed and on which ranks.
        cannot_run: Whether every failure means that the plan cannot run on that rank, for example because memory ran
            out. False if at least one failure is a fault of the code.
    """

    def __init__(self, message: str, *, reason: str = "", cannot_run: bool = False) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.cannot_run = cannot_run


class LossScaleError(CastwiseError, RuntimeError):
    """Gradients still overflow although the loss scale has reached its smallest allowed value."""


class NonFiniteError(CastwiseError, ArithmeticError):
    """A loss or a gradient is infinite or NaN, and changing the loss scale cannot help."""


class DivergedError(CastwiseError, ArithmeticError):
    """A training run diverged repeatedly, although it was reset to an earlier good state each time."""


class WorkloadError(CastwiseError, ValueError):
    """A workload could not be found, imported or run.

    A workload (:class:`castwise.Workload`) gives castwise's experiments a model, its optimizer, its batches and its
    loss.
    """


class LintError(CastwiseError, ValueError):
    """A script or folder could not be checked by ``castwise doctor --lint PATH``."""


class MigrateError(CastwiseError, ValueError):
    """A script or folder could not be changed by ``castwise migrate PATH``."""


class MissingLibraryError(CastwiseError, ImportError):
    """An optional library is missing.

    The message says which extra of castwise installs it.
    """


class CheckpointError(CastwiseError, ValueError):
    """A checkpoint cannot be saved, is damaged, or does not fit the training run into which it is loaded."""


def sentence(error: BaseException, whole: bool = True) -> str:
    """Return an exception's message on one line, preceded by the type's name unless castwise raised the exception.

    Args:
        error: The exception.
        whole: Whether to return the whole message. Otherwise only its first line is returned.
    """
    said = str(error).strip()
    text = " ".join(said.split() if whole else said.splitlines()[:1]).strip()
    name = "" if isinstance(error, CastwiseError) else type(error).__name__
    return ": ".join(part for part in (name, text) if part)


_OWN = str(Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_users(file: str) -> bool:
    """Whether a Python file belongs to the user, that is, neither to castwise nor to an installed library."""
    return not file.startswith((_OWN, *_LIBRARIES, "<frozen"))


class Elsewhere(Exception):
    """The cause of an error that was first raised in another process. Its message is the traceback in that process.

    Attributes:
        place: The result of :func:`place` in that process.
    """

    def __init__(self, trace: str, place: str) -> None:
        super().__init__(f"in another process:\n{trace}")
        self.place = place


def place(error: BaseException) -> str:
    """Return the innermost line of the user's own code in an error's traceback, such as ``job.py, line 3, in loss``.

    If the error was raised in a process that castwise started, that process's traceback is used. The result is empty if
    the traceback, up to where castwise caught the error, has no line of the user's code.
    """
    if isinstance(error.__cause__, Elsewhere):
        return error.__cause__.place
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    return ""


def told(error: BaseException, whole: bool = True) -> str:
    """Return an exception's message and, in parentheses, the line of the user's code that it came from.

    The message is the result of :func:`sentence`, and the line is the result of :func:`place`. The line is left out if
    there is none, or if castwise raised the exception.
    """
    where = "" if isinstance(error, CastwiseError) else place(error)
    return sentence(error, whole) + (f" ({where})" if where else "")


def check_count(call: str, name: str, value: object, least: int) -> None:
    """Raise an error unless an argument is a whole number of at least ``least``.

    Raises:
        PlanError: The argument is no such number. The message names the call, the argument and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{call}({name}={value!r}): needs a whole number >= {least}")
