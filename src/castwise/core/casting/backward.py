"""The active precision when a part of forward is recomputed during backward.

Activation checkpointing restores torch's autocast state (enabled, dtype) but not the frame. :func:`note_backward` makes
the autograd node of a prepared module's output set, on this thread and before it runs, the frame in which the module
ran; :func:`mark_boundary` adds such a node at the inputs, and at the loss. Autograd executes the nodes of one thread
strictly in reverse order, so nested modules are handled too.

A block that the user opens has no output at which to add a node. It records the range of sequence numbers of the nodes
created inside it, and a recomputation finds its block by the number of the node that triggered it.
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
        A view of the tensor. It may be written in place if the tensor may: the tensor's node is recorded too, since
        autograd bypasses the view after a write. Tensor hooks on the view are then lost, so outputs that users receive
        go to :func:`note_backward` instead. The tensor itself is returned if no gradient will flow, and inside a
        transform of torch.func, where nothing is recomputed.
    """
    if not tensor.requires_grad or not torch.is_grad_enabled() or _torch.dispatcher.in_transform():
        return tensor
    note_backward(tensor, frame)
    return note_backward(tensor.view_as(tensor), frame)


def note_backward(tensor: torch.Tensor, frame: Frame | None) -> torch.Tensor:
    """Like :func:`mark_boundary`, without an extra node: ``tensor`` is not replaced.

    Everything that backward runs between the node of ``tensor`` and the next one that is marked or noted counts as run
    in ``frame``, even if it was not. The first record of a node is kept, since it was made where the node was created.
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
        # Numbers are counted per thread. CPU nodes run on the thread that calls backward; each device has its own thread.
        if made_by != here and frame.device_type == "cpu":
            continue
        if last <= number:
            break
        if best < first <= number:
            best, found = first, frame  # of nested blocks the innermost began last
    return found
