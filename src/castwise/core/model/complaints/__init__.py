"""Explain dtype errors of operators: the module and line that caused them, and cures that were tried."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.model.complaints.cures import Complaint, Site
from castwise.core.model.complaints.words import met_in
from castwise.errors import CastwiseError

__all__ = ["Site", "explain_backward", "explain_dtype_error"]


def explain_dtype_error(
    error: BaseException | None, model: nn.Module, site: Site, *, outside: bool = False
) -> None:
    """Add the source and the cures of an operator's dtype error to its message.

    The failed call is repeated on copies of its arguments, under other rules and with its arguments in other dtypes;
    every advised change has worked there. Nothing else is run, and the error stays the same, with a longer message. The
    hook that calls this cannot raise an error, since torch silences it.

    Args:
        error: The error that is being raised.
        model: The prepared model.
        site: The settings in force in the model.
        outside: Whether the error may have come from outside the model, where no plan is in force.
    """
    if error is not None and _is_new(error):
        _add(error, lambda: Complaint(error, model, site, outside).said())


def explain_backward(error: BaseException, model: nn.Module, site: Site, loss: Tensor) -> None:
    """Like :func:`explain_dtype_error`, for an error from the backward of a loss."""
    if _is_new(error) and met_in(str(error)):
        _add(error, lambda: Complaint(error, model, site, True).said_of_backward(loss))


def _is_new(error: BaseException) -> bool:
    """Whether an error may be a dtype error that has not been explained yet."""
    return (
        isinstance(error, RuntimeError | TypeError | ValueError | AssertionError)
        and not isinstance(error, CastwiseError | torch.OutOfMemoryError | torch.AcceleratorError)
        and bool(error.args)
        and isinstance(error.args[0], str)
        and "castwise:" not in error.args[0]
    )


def _add(error: BaseException, say: Callable[[], str]) -> None:
    # the original error matters more than an error while explaining it
    with contextlib.suppress(Exception), _torch.operators.unobserved():
        if said := say():
            error.args = (f"{error.args[0]}\ncastwise: {said}", *error.args[1:])
