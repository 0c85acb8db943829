"""Which attachments live, and the hooks of models that bring parameters and masters together before a look at them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.compiler import is_compiling

__all__ = ["live", "settle_all", "sync", "sync_first"]

live: list[weakref.ref[Any]] = []
"""Every attachment that has masters to keep; the attachments see to it."""


def sync(*_: Any) -> None:
    """Bring every model up to date with masters that were written outside of a step; cheap where there are none."""
    for reference in tuple(live):
        attachment = reference()
        if attachment is not None:
            attachment.sync()


def settle_all() -> None:
    """Bring parameters and masters together, whichever of the two was written."""
    for reference in tuple(live):
        attachment = reference()
        if attachment is not None:
            attachment.settle()


def sync_first(module: nn.Module, *_: Any) -> None:
    """Hook before ``forward`` and ``state_dict`` of a model. It holds nothing, so models still pickle and copy.

    What torch.compile has compiled runs without it.
    """
    if not is_compiling():
        sync()
