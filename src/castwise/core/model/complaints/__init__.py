"""Explain dtype errors of operators: name the module and the line that caused an error, and cures that were tried."""

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
    """Add the source and the cures of an operator's dtype error to the error's message.

    The failed call is repeated on copies of its arguments, under other rules of the plan and with arguments in other
    dtypes. A change is suggested only if the repeated call worked with it. No other code is run. The error object stays
    the same and only its message gets longer, because torch would silence an error that is raised in a hook.

    Args:
        error: The error that is being raised.
        model: The prepared model.
        site: The precision settings under which the model runs.
        outside: Whether the error may have been raised outside the model's ``forward``, where no plan is in force.
    """
    if error is not None and _is_new(error):
        _add(error, lambda: Complaint(error, model, site, outside).said())


def explain_backward(error: BaseException, model: nn.Module, site: Site, loss: Tensor) -> None:
    """Add the source and the cures of a dtype error to its message, if the error came from the backward pass of a loss.

    See :func:`explain_dtype_error`.
    """
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
    # if explaining the error fails, the user must still get the original error
    with contextlib.suppress(Exception), _torch.operators.unobserved():
        if said := say():
            error.args = (f"{error.args[0]}\ncastwise: {said}", *error.args[1:])
