"""Frames inside torch.compile.

A frame that is entered outside of a compiled function is guarded by Dynamo (``_torch.dynamo.set_guard_code``) and is
part of the key of the compile caches on disk; one that is entered inside is a node of the traced graph
(:func:`graph_push`). In both cases the override kernels run while the graph is traced, so the casts are in the graph,
and eager and compiled code use one implementation.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.compiler import config

from castwise.core import _torch
from castwise.core.casting import frames
from castwise.core.casting.frames import Frame
from castwise.errors import StateError

graph_frames: dict[str, Frame] = {}
"""Frames to which traced graphs may refer, by key; filled when a plan is resolved."""

graph_spans: deque[tuple[str, int, int]] = deque(maxlen=256)
"""Blocks that a traced graph entered and left when it ran: key, number of the first autograd node, number after the
last."""
_open: list[tuple[str, int]] = []

_code_of_key: dict[str, int] = {}
_lock = threading.Lock()


def code_for(key: str) -> int:
    """A number for Dynamo's guard that is unique to this key in this process.

    Raises:
        StateError: After some 2,700 different sets of overrides; sharing a number would run the wrong casts.
    """
    with _lock:
        code = _code_of_key.setdefault(key, len(_code_of_key) + 1)
    if code > _torch.dynamo.MAX_GUARD_CODE:
        raise StateError(
            f"autocast: more than {_torch.dynamo.MAX_GUARD_CODE} different sets of operator overrides in one process; "
            "torch.compile could no longer tell them apart. Start a new process."
        )
    return code


def graph_push(key: str) -> None:
    """Enter a block inside a compiled function by the key of its frame, as a node of the graph."""
    trace = _torch.dynamo.DynamoTrace.current()
    if trace is not None:
        level = frames.depth()
        trace.hold(lambda: frames.unwind(level))
    _open.append((key, _torch.autograd.sequence_number()))
    frames.push(graph_frames[key])


def graph_pop() -> None:
    """Leave the block that was entered last."""
    trace = _torch.dynamo.DynamoTrace.current()
    if trace is not None:
        trace.release()
    if _open:
        graph_spans.append((*_open.pop(), _torch.autograd.sequence_number()))
    frames.pop()


trace_leases: list[Any] = []
"""Override kernels of blocks inside a function that is being compiled, needed until its graph has been traced."""


def _tag_caches(_: object) -> None:
    """Add the active frame to the key of the compile caches on disk."""
    frame = frames.thread.state.frame
    user = str(config.cache_key_tag).split("|castwise:")[0]
    config.cache_key_tag = f"{user}|castwise:{frame.key}" if frame is not None and frame.overrides else user


def _end_trace(_: object) -> None:
    trace_leases.clear()


def _watch_compilations() -> None:
    _torch.dynamo.keep_compile_callbacks(_tag_caches, _end_trace)


_BETWEEN_GRAPHS = tuple(
    f"castwise.core.{name}"
    for name in (
        "_torch",
        "casting",
        "model.borders",
        "model.complaints",
        "model.rounding",
        "model.stored",
        "plans",
        "masters",
        "scaler",
    )
)


_contexts: list[tuple[type, Callable[[Any], bool]]] = []


def trace_context(cls: type, as_torchs: Callable[[Any], bool]) -> None:
    """Make Dynamo trace instances of exactly this class, made outside the compiled code, through their own methods.

    By default it treats an instance of a subclass of ``torch.autocast`` as torch's class; ``as_torchs`` returns for
    which instances that is right.
    """
    if frames.watch_compilations is not None:
        _torch.dynamo.trace_context(cls, as_torchs)
    else:
        _contexts.append((cls, as_torchs))


@functools.cache
def get_ready_with_dynamo() -> None:
    """Call :func:`get_ready_for_compile` once Dynamo is imported, for blocks used outside of compiled code."""
    _torch.dynamo.when_dynamo_is_loaded(get_ready_for_compile)


def get_ready_for_compile() -> None:
    """Register frames with Dynamo; this imports it, which takes about a second and happens anyway at an optimizer's first step."""
    _watch_compilations()
    _torch.dynamo.skip_modules(_BETWEEN_GRAPHS)
    if frames.watch_compilations is not None:
        return
    frames.watch_compilations = _watch_compilations
    _torch.dynamo.graph_function(graph_push)
    _torch.dynamo.graph_function(graph_pop)
    for cls, as_torchs in _contexts:
        _torch.dynamo.trace_context(cls, as_torchs)
