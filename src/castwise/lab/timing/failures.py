"""Recognise errors which mean that a plan cannot run, and give the reason in a clause.

These are errors about dtypes, missing kernels and memory. They are recognised by torch's messages, since torch raises the same
few exception types for everything. The tests contain each message, from torch itself or from a report.
"""

from __future__ import annotations

import errno
import re

import torch

from castwise.core.ranks.group import first_line
from castwise.errors import CastwiseError, RankError, WorkloadError, place

_DTYPE = re.compile(
    r"dtype|scalar ?type|data type|types other than|float, double, cfloat"
    r"|(?i:bfloat16|float16|float8|\b(?:bf|fp)16\b)|'Half'|Half(?:Type|Tensor)|::Half|type:? Half"
    r"|\bHalf\b.*\b(?:Float|Double)\b|\b(?:Float|Double)\b.*\bHalf\b"
)
"""Messages of an operator without a dtype, of two mixed dtypes, or of a number that a dtype cannot hold."""
_KERNEL = re.compile(
    r"Could not run '\w+::|not currently implemented for the MPS device|could not create a primitive|[Nn]o available kernel"
    r"|no kernel image is available|invalid device function|STATUS_(?:NOT_SUPPORTED|ARCH_MISMATCH)"
    r"|[Uu]nable to find (?:an engine|a valid cuDNN)|no valid convolution algorithms|compute capability"
    r"|_fused_\w+` does not support"
)
"""Messages of an operator without a kernel on a device: torch's dispatcher, oneDNN, attention, CUDA, cuBLAS, cuDNN."""
_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED", re.IGNORECASE
)
"""Out-of-memory messages other than ``torch.OutOfMemoryError``: the CPU's allocator, MPS, CUDA itself and its libraries."""
_OF_PYTHON = re.compile(
    r"Got unsupported ScalarType|(?:BFloat16|Half|Float8\w*) is not supported on MPS|support for that dtype"
    r"|Cannot convert a MPS Tensor|^RNN input dtype \("
)
"""Messages about dtypes in a TypeError or ValueError, which a user's own faulty code raises too."""


def cannot_run(error: BaseException) -> bool:
    """Whether an error means that a plan cannot run.

    That is so if an operator or the device lacks a format, memory is exhausted, or castwise refuses the plan. Any other error
    is a fault of the code that ran and not of the plan; this includes errors from a workload's own checks of its numbers.
    """
    if isinstance(error, RankError):
        return error.cannot_run
    if isinstance(error, CastwiseError):
        return not isinstance(error, WorkloadError)
    return _is_memory(error) or _is_lacking(error)


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_MEMORY.search(str(error)))


def _is_lacking(error: BaseException) -> bool:
    said = str(error)
    if isinstance(error, (TypeError, ValueError)):
        return bool(_OF_PYTHON.search(said))
    return isinstance(error, RuntimeError) and bool(_DTYPE.search(said) or _KERNEL.search(said))


def unfit(error: BaseException) -> str:
    """Return the reason why a plan could not be run, as a short text for a table."""
    if isinstance(error, RankError):
        return error.reason
    if isinstance(error, CastwiseError):
        return first_line(error)
    if _is_memory(error):
        return "out of memory"
    if _is_lacking(error):
        return f"not supported by this device: {first_line(error)}"
    where = place(error)
    return f"{type(error).__name__}: {first_line(error)}" + (f" ({where})" if where else "")
