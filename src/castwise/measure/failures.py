"""Why a plan could not be run, in a clause."""

from __future__ import annotations

import re

import torch

from castwise.errors import CastwiseError, RankError, WorkloadError
from castwise.ranks.group import first_line

_LACKING = re.compile(
    r"not implemented|unsupported|(?:not|only|n't)[ _]support|not create a primitive|types other than"
    r"|dtype|scalar ?type|float16|\bHalf\b|should be the same",
    re.IGNORECASE,
)
"""What torch says where an operator lacks a dtype or where two dtypes meet, and oneDNN and cuBLAS."""
_CHECKS = (ArithmeticError, AssertionError, ValueError)
"""What code raises that looks at its own numbers, as ``torch.distributions`` does: under a format where fp32 passes, the
format is to blame."""


def cannot_run(error: BaseException) -> bool:
    """Whether an error says that a plan cannot run.

    That is a format that an operator or the device lacks, no memory, or numbers that the model's own checks refuse. Any
    other error is a fault of the code that ran, and no plan is to blame for it.
    """
    if isinstance(error, RankError):
        return error.cannot_run
    if isinstance(error, WorkloadError):
        return False
    if isinstance(error, (CastwiseError, MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, _CHECKS) or _is_lacking(error)


def _is_lacking(error: BaseException) -> bool:
    if isinstance(error, NotImplementedError):
        return True
    return isinstance(error, (RuntimeError, TypeError)) and bool(_LACKING.search(str(error)))


def unfit(error: BaseException) -> str:
    """Why a plan could not be tried, as a reason in a table."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "out of memory"
    if isinstance(error, RankError):
        return error.reason
    if isinstance(error, CastwiseError):
        return first_line(error)
    what = "not supported by this device" if _is_lacking(error) else type(error).__name__
    return f"{what}: {first_line(error)}"
