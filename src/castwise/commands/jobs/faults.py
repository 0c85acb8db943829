"""Error messages that name the cause of a failed training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from castwise.core.plans.plan import Plan
from castwise.errors import CastwiseError, WorkloadError, told
from castwise.lab.workloads.workload import Workload


@contextlib.contextmanager
def calls(workload: Workload, what: str) -> Iterator[None]:
    """Turn errors inside a ``with`` block, which calls a workload's function, into errors that name the function.

    ``what`` is the name in the message, such as ``model()``.

    Raises:
        WorkloadError: The function raised an error. Errors of castwise itself are raised unchanged.
    """
    try:
        yield
    except CastwiseError:
        raise
    except (Exception, SystemExit) as error:
        raise WorkloadError(f"workload {workload.name!r}: {what} failed: {told(error)}") from error


def remedy(plan: Plan) -> str:
    """Return a suggestion of what to do about a non-finite loss under a plan that has no loss scale."""
    if plan.compute == "fp16":
        return "use a plan with a loss scale, such as fp16-mixed, or bf16-mixed, which needs no loss scale"
    if plan.compute == "bf16":
        return "check whether the loss stays finite under fp32; if it does not, lower the learning rate"
    return "lower the learning rate, or look for a division by zero or a logarithm of zero in the loss"
