"""Which attachments live, and the hooks of models that bring parameters and masters together before a look at them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.compiler import is_compiling

__all__ = ["attachments", "live", "refresh", "settle", "sync", "sync_first"]

live: list[weakref.ref[Any]] = []
"""Every attachment that has masters to keep; the attachments see to it."""


def attachments() -> Iterator[Any]:
    """Those that live."""
    for reference in tuple(live):
        attachment = reference()
        if attachment is not None:
            yield attachment


def sync(model: nn.Module) -> None:
    """Bring a model up to date with masters that were written outside of a step; cheap where there are none.

    What trains other models alone is left alone: it may be another thread's, or broken.
    """
    for attachment in attachments():
        if attachment.concerns(model):
            attachment.sync()


def settle(model: nn.Module) -> None:
    """Bring a model's parameters and their masters together, whichever of the two was written."""
    for attachment in attachments():
        if attachment.concerns(model):
            attachment.settle()


def refresh(model: nn.Module) -> None:
    """Give masters all that was written to a model, by ``parameter.data`` too. Looks at values, so it waits for the device."""
    for attachment in attachments():
        if attachment.concerns(model):
            attachment.refresh_from_model()


def sync_first(module: nn.Module, *_: Any) -> None:
    """Hook before ``forward`` and ``state_dict`` of a model. It holds nothing, so models still pickle and copy.

    What torch.compile has compiled runs without it.
    """
    if not is_compiling():
        sync(module)
