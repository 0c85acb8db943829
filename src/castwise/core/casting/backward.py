"""The active precision where a part of forward is recomputed during backward.

Activation checkpointing restores what torch knows (enabled, dtype) and not the frame. :func:`note_backward` has the autograd
node of what a prepared module returns tell this thread, before it runs, which frame the module ran in;
:func:`mark_boundary` puts a node of its own where tensors go in, and over the loss. Autograd executes nodes that were made on
one thread strictly in reverse order, so nested modules are right too.

A block that was entered by hand has no such place to return from. It notes which numbers autograd gave to the nodes made
inside it, and a recomputation finds its block by the number of the node that asked for it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from castwise.core import _torch
from castwise.core.casting.frames import BackwardFrame, Frame, left_blocks, thread

_NOTED = "castwise frame"
_live_tasks: set[int] = set()


def current_frame() -> Frame | None:
    """The active frame of this thread, in forward or in a recomputation during backward."""
    if thread.state.backward is None:
        return thread.state.frame
    entry: BackwardFrame | None = thread.state.backward
    inside = _torch.autograd.graph_task_id() != -1
    while entry is not None and not (inside and entry.task in _live_tasks):
        entry = entry.outer
    thread.state.backward = entry
    if entry is None or len(thread.state.saved) != entry.depth:
        return thread.state.frame
    return entry.frame


def _enter_backward(frame: Frame | None) -> None:
    task = _torch.autograd.graph_task_id()
    entry = thread.state.backward
    if entry is not None and entry.task == task:
        entry.frame = frame
        entry.depth = len(thread.state.saved)
        return
    if task not in _live_tasks:
        _live_tasks.add(task)
        _torch.autograd.on_graph_task_end(lambda: _end_backward(task))
    _forget_ended()
    thread.state.backward = BackwardFrame(task, frame, len(thread.state.saved), thread.state.backward)


def _end_backward(task: int) -> None:
    _live_tasks.discard(task)
    _forget_ended()


def _forget_ended() -> None:
    """Remove the frames of finished backwards, since they hold objects of a session."""
    entry = thread.state.backward
    while entry is not None and entry.task not in _live_tasks:
        entry = entry.outer
    thread.state.backward = entry


def mark_boundary(tensor: torch.Tensor, frame: Frame | None) -> torch.Tensor:
    """Record for backward, with an extra node, that the operator of ``tensor`` ran in ``frame``.

    Returns:
        A view of the tensor, which may be written to in place where the tensor may: what made it is noted too, since autograd
        then goes there past the view. Tensor hooks on such a view do not outlive that, so what users see is noted, not
        marked. The tensor itself where no gradient will flow, and inside a transform of torch.func, where nothing is
        recomputed.
    """
    if not tensor.requires_grad or not torch.is_grad_enabled() or _torch.dispatcher.in_transform():
        return tensor
    note_backward(tensor, frame)
    return note_backward(tensor.view_as(tensor), frame)


def note_backward(tensor: torch.Tensor, frame: Frame | None) -> torch.Tensor:
    """As :func:`mark_boundary`, without an extra node: ``tensor`` is not replaced.

    What runs backward between the node of ``tensor`` and the next one that is marked or noted counts as made in
    ``frame``, whether it was or not. What has been noted of a node stays: it was said where it was made.
    """
    node = tensor.grad_fn if torch.is_grad_enabled() and not _torch.dispatcher.in_transform() else None
    if node is None:
        return tensor
    said: Any = node.metadata
    if _NOTED not in said:
        said[_NOTED] = True
        node.register_prehook(lambda _: _enter_backward(frame))
    return tensor


def left_block() -> Frame | None:
    """The frame of the block whose nodes this thread is running in backward."""
    number = _torch.autograd.running_node_number() if left_blocks else None
    if number is None:
        return None
    here = threading.get_ident()
    best, found = -1, None
    for first, last, made_by, frame in reversed(left_blocks):
        # Numbers are counted per thread. The CPU's nodes run on the thread that calls backward; a device has its own.
        if made_by != here and frame.device_type == "cpu":
            continue
        if last <= number:
            break
        if best < first <= number:
            best, found = first, frame  # of blocks inside one another the innermost began last
    return found
