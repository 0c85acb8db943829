"""Synchronise a model's parameters with their fp32 masters before the model is read, in all optimizers with masters."""

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
"""Every :class:`Attachment` that manages fp32 masters, by its ``id``.

Attachments add and remove themselves, from any thread.
"""


def attachments(model: nn.Module | None = None) -> Iterator[Any]:
    """Yield the live :class:`Attachment` objects that manage fp32 masters of a model's parameters.

    Those that only concern other models are left out, since another thread may be using them, or they may be broken.

    Args:
        model: The model. With None, all live objects are yielded.
    """
    for reference in (
        live.valuerefs()
    ):  # a list that is created atomically, since other threads attach and detach meanwhile
        attachment = reference()
        if attachment is not None and (model is None or attachment.concerns(model)):
            yield attachment


def sync(model: nn.Module) -> None:
    """Update a model from fp32 masters that were written outside of a step.

    This costs little if there are no masters.
    """
    for attachment in attachments(model):
        attachment.sync()


def settle(model: nn.Module) -> None:
    """Copy writes to a model's parameters into their fp32 masters, and writes to masters into the parameters."""
    for attachment in attachments(model):
        attachment.settle()


def refresh(model: nn.Module) -> None:
    """Update fp32 masters from all writes to a model's parameters, even those that raised no version counter.

    Values are compared, so the host waits for the device.
    """
    for attachment in attachments(model):
        attachment.refresh_from_model()


def join_files(model: nn.Module, *_: Any) -> None:
    """Give fp32 masters the fp32 values that the optimizers of a model have loaded, if they match the model's weights.

    This is a post-hook of the model's ``load_state_dict``, after which they may match.
    """
    for attachment in attachments(model):
        attachment.join_files()


def sync_first(module: nn.Module, *_: Any) -> None:
    """Update a model from its fp32 masters. This is a hook before the model's ``forward`` and ``state_dict``.

    The hook has no state, so models can still be pickled and copied. torch.compile removes the hook from the code
    that it traces. So the update is also made before each call of the compiled code.
    """
    if not is_compiling():
        sync(module)
    elif is_dynamo_compiling():
        _sync_compiled(id(module))


class _Compiled:
    """A function to call before compiled code runs a model, which updates the model from its fp32 masters."""

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
    """Update a model now and before each later call of the code that is being compiled.

    Dynamo calls this while tracing.

    Args:
        address: The ``id`` of the model, because Dynamo of torch 2.11 passes numbers but no modules.
    """
    callback = _Compiled(_torch.dynamo.object_at(address))
    callback()
    _torch.dynamo.before_compiled_calls(callback)
    return True


_torch.dynamo.mark_constant(_sync_compiled)
