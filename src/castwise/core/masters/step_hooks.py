"""Hooks around an optimizer's step, compiled or not.

In a compiled step Dynamo skips these two frames and runs what they call uncompiled; in eager mode
they cost one call each.
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
    """Pre-hook of an optimizer whose masters an :class:`~castwise.masters.Attachment` keeps."""
    if not _torch.tensors.dynamo_callback():
        return attachment.before_step(optimizer, args, kwargs)  # type: ignore[no-any-return]
    return _eagerly(_before_compiled_step)(attachment, optimizer, args, kwargs)  # type: ignore[no-any-return]


def after_step(attachment: Any, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Post-hook of such an optimizer."""
    if not _torch.tensors.dynamo_callback():
        attachment.after_step()
    else:
        _eagerly(_after_compiled_step)(attachment)


def _before_compiled_step(
    attachment: Any, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Call | None:
    """Dynamo's guards bypass ``Master.grad``, so store the gradients where the guards read them."""
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
