"""Why a plan could not be run, in a clause."""

from __future__ import annotations

import torch

from castwise.errors import CastwiseError, RankError

__all__ = ["unfit"]


def unfit(error: BaseException) -> str:
    """Why a plan could not be tried, as a reason in a table."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "out of memory"
    if isinstance(error, RankError):
        return error.reason
    if isinstance(error, CastwiseError):
        return first
    return f"not supported by this device: {first}"
