"""The live attachments, and the model hooks that synchronise parameters and masters before they are read."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.compiler import is_compiling, is_dynamo_compiling

from castwise.core import _torch
from castwise.errors import StateError

live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Every attachment that has masters, by its id; attachments add and remove themselves, from any thread."""


def attachments(model: nn.Module | None = None) -> Iterator[Any]:
    """The live attachments, of one model or all.

    Attachments of other models only are left out: they may be in use by another thread, or broken.
    """
    for (
        reference
    ) in live.valuerefs():  # a list, created atomically: other threads attach and detach meanwhile
        attachment = reference()
        if attachment is not None and (model is None or attachment.concerns(model)):
            yield attachment


def sync(model: nn.Module) -> None:
    """Update a model from masters that were written outside of a step; cheap without masters."""
    for attachment in attachments(model):
        attachment.sync()


def settle(model: nn.Module) -> None:
    """Copy writes to a model's parameters into their masters, and writes to masters into the parameters."""
    for attachment in attachments(model):
        attachment.settle()


def refresh(model: nn.Module) -> None:
    """Update masters from all writes to a model, also through ``parameter.data``. Compares values, so it waits for the device."""
    for attachment in attachments(model):
        attachment.refresh_from_model()


def join_files(model: nn.Module, *_: Any) -> None:
    """Hook after ``load_state_dict`` of a model: masters loaded by its optimizers may now match its weights."""
    for attachment in attachments(model):
        attachment.join_files()


def sync_first(module: nn.Module, *_: Any) -> None:
    """Hook before ``forward`` and ``state_dict`` of a model. It has no state, so models still pickle and copy.

    If torch.compile has removed it while tracing, the same is done before each call of the compiled code.
    """
    if not is_compiling():
        sync(module)
    elif is_dynamo_compiling():
        _sync_compiled(id(module))


class _Compiled:
    """Called before compiled code that runs a model."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> None:
        module = self._module()
        if module is not None:
            with contextlib.suppress(
                StateError
            ):  # the model was cast; its next step raises an error that says so
                sync(module)


def _sync_compiled(address: int) -> bool:
    """Called by Dynamo while it traces the hook; torch 2.11 passes numbers but no modules."""
    callback = _Compiled(_torch.dynamo.object_at(address))
    callback()
    _torch.dynamo.before_compiled_calls(callback)
    return True


_torch.dynamo.mark_constant(_sync_compiled)
