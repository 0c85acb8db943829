"""Find the precision for a part of forward that is recomputed during backward.

Activation checkpointing restores torch's autocast state (enabled, dtype), but not the active
:class:`~castwise.core.casting.frames.Frame`, which holds castwise's precision settings. So the autograd graph
restores the frame. :func:`note_backward` adds a pre-hook to the autograd node of a prepared module's output. The
pre-hook activates, on the thread of backward, the frame in which the module ran. :func:`mark_boundary` adds a node
with such a pre-hook at the module's inputs and at the loss. Autograd executes the nodes of one thread strictly in
reverse order, so nested modules are handled too.

An autocast block that the user opens has no output at which to add a node. Such a block records the range of sequence
numbers of the autograd nodes created inside it. A recomputation finds its block by the number of the node that
triggered the recomputation.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from castwise.core import _torch
from castwise.core.casting.frames import BackwardFrame, Frame, left_blocks, open_elsewhere, states, thread

_NOTED = "castwise frame"
_live_tasks: set[int] = set()


def current_frame() -> Frame | None:
    """Return the active :class:`Frame` of this thread, in forward or in a recomputation during backward."""
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
    """Drop each :class:`Frame` that was kept for a backward pass which has finished, since it holds objects of a session."""
    entry = thread.state.backward
    while entry is not None and entry.task not in _live_tasks:
        entry = entry.outer
    thread.state.backward = entry


def mark_boundary(tensor: torch.Tensor, frame: Frame | None) -> torch.Tensor:
    """Return a view of ``tensor`` whose autograd node activates a :class:`Frame` when backward reaches the node.

    So parts of forward that backward recomputes after reaching this node run in the frame's precision.

    Returns:
        A view of the tensor, which may be written in place if the tensor may. Autograd bypasses the view after a write,
        so the node of the tensor itself activates the frame as well. A write loses tensor hooks on the view, so outputs
        that users receive go to :func:`note_backward` instead. The tensor itself is returned if no gradient will flow,
        and inside a transform of torch.func, where nothing is recomputed.
    """
    if not tensor.requires_grad or not torch.is_grad_enabled() or _torch.dispatcher.in_transform():
        return tensor
    note_backward(tensor, frame)
    return note_backward(tensor.view_as(tensor), frame)


def note_backward(tensor: torch.Tensor, frame: Frame | None) -> torch.Tensor:
    """Make the autograd node of ``tensor`` activate a :class:`Frame` when backward reaches the node.

    The tensor is returned unchanged.

    The frame stays active until backward reaches another node of :func:`mark_boundary` or this function. So forward
    code that is recomputed before that runs in this frame, even if it first ran in another frame. If this function is
    called twice for a node, the first frame is kept, since it was active when the node was created.
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
    """Return the :class:`Frame` of the autocast block in which the running autograd node was created, or None."""
    number = _torch.autograd.running_node_number() if left_blocks or len(states) > 1 else None
    if number is None:
        return None
    here = threading.get_ident()
    best, found = -1, None
    for first, frame in open_elsewhere():  # the outer ones first
        if frame.device_type != "cpu" and best <= first <= number:
            best, found = first, frame
    for first, last, made_by, frame in reversed(left_blocks):
        # Numbers are counted per thread. CPU nodes run on the thread that calls backward; each device has its own thread.
        if made_by != here and frame.device_type == "cpu":
            continue
        if last <= number:
            break
        if best <= first <= number:
            best, found = first, frame  # of nested blocks the innermost began last, or was left first
    return found


def inner_block() -> Frame | None:
    """Return the result of :func:`left_block` for a node that was created inside of the block that is open on this thread.

    The block that the node was created in was left, and is inside of the open one. A recomputation that opens blocks itself is
    cast by these.
    """
    entered = thread.state.saved[-1][8]
    number = _torch.autograd.running_node_number() if type(entered) is int else None
    return left_block() if number is not None and entered <= number else None
