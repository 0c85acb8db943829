"""Hooks around the step of an optimizer with fp32 masters, which also work if the step is compiled by torch.compile.

In a compiled step, Dynamo does not compile the two hooks, and what they call runs uncompiled. In eager mode each hook
costs one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.masters.parameter import mirror_grad

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def before_step(
    attachment: Any, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    """Call :meth:`~castwise.masters.Attachment.before_step` before a step.

    This is a step pre-hook of an optimizer with fp32 masters.
    """
    if not _torch.tensors.dynamo_callback():
        return attachment.before_step(optimizer, args, kwargs)  # type: ignore[no-any-return]
    return _eagerly(_before_compiled_step)(attachment, optimizer, args, kwargs)  # type: ignore[no-any-return]


def after_step(attachment: Any, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call :meth:`~castwise.masters.Attachment.after_step` after a step.

    This is a step post-hook of an optimizer with fp32 masters.
    """
    if not _torch.tensors.dynamo_callback():
        attachment.after_step()
    else:
        _eagerly(_after_compiled_step)(attachment)


def _before_compiled_step(
    attachment: Any, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    """Call ``Attachment.before_step``, then store gradients where Dynamo's guards read them.

    The guards bypass the property ``Master.grad``.
    """
    call: Call | None = attachment.before_step(optimizer, args, kwargs)
    for master in attachment.masters:
        mirror_grad(master, master.grad)
    return call


def _after_compiled_step(attachment: Any) -> None:
    for master in attachment.masters:
        mirror_grad(master, None)  # so that clearing the model's gradients frees their memory
    attachment.after_step()


@functools.cache
def _eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled
