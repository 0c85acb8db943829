"""Make torch.compile respect the active :class:`~castwise.core.casting.frames.Frame`, the precision settings of a plan.

A frame that is entered outside of a compiled function is guarded by Dynamo (``_torch.dynamo.set_guard_code``) and is
part of the key of the compile caches on disk. A frame that is entered inside a compiled function is a node of the
traced graph (:func:`graph_push`). In both cases the override kernels run while the graph is traced, so the graph
contains their casts, and eager and compiled code use one implementation.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.compiler import config

from castwise.core import _torch
from castwise.core.casting import frames
from castwise.core.casting.frames import Frame
from castwise.errors import StateError

graph_frames: dict[str, Frame] = {}
"""Maps the key of each :class:`Frame` to the frame, to which traced graphs refer by its key."""

graph_spans: deque[tuple[str, int, int]] = deque(maxlen=256)
"""The autocast blocks that running graphs have entered and left.

For each block: the key of its frame, the sequence number of its first autograd node, and the number after its last node."""
_open: list[tuple[str, int]] = []

_code_of_key: dict[str, int] = {}
_lock = threading.Lock()


def code_for(key: str) -> int:
    """Return the number by which Dynamo's guard recognises the :class:`Frame` with this key.

    No other key of this process has the same number.

    Raises:
        StateError: The process has had more than some 2,700 different sets of overrides. If two shared a number, compiled
            code would run the wrong casts.
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
    """Enter an autocast block inside a compiled function. The call becomes a node of the graph.

    Args:
        key: The key of the block's :class:`Frame`.
    """
    trace = _torch.dynamo.DynamoTrace.current()
    if trace is not None:
        level = frames.depth()
        trace.hold(lambda: frames.unwind(level))
    _open.append((key, _torch.autograd.sequence_number()))
    frames.push(graph_frames[key])


def graph_pop() -> None:
    """Leave the autocast block that :func:`graph_push` entered last. The call becomes a node of the graph."""
    trace = _torch.dynamo.DynamoTrace.current()
    if trace is not None:
        trace.release()
    if _open:
        graph_spans.append((*_open.pop(), _torch.autograd.sequence_number()))
    frames.pop()


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Return a context manager that leaves what code that is traced inside of it has entered and, after an error, not left.

    These are autocast blocks, and leases on the kernels of blocks that the code creates.
    """
    level, opened, leased = frames.depth(), len(_open), len(trace_leases)
    try:
        yield
    finally:
        frames.unwind(level)
        del _open[opened:]
        del trace_leases[leased:]


trace_leases: list[Any] = []
"""Leases on the override kernels of autocast blocks inside a function that is being compiled.

They are needed until its graph has been traced."""


_TAG = "|castwise:"


def _start_trace(_: object) -> None:
    """Add to the key of the compile caches on disk what torch does not: the active :class:`Frame`, if it has overrides.

    In the forward of prepared modules, backward is traced without autocast.
    """
    _torch.dynamo.trace_backward_without_autocast(frames.only_modules())
    frame = frames.thread.state.frame
    ours = (frame.key if frame is not None and frame.overrides else "") + _torch.dynamo.unkeyed_autocast()
    if ours:
        config.cache_key_tag = f"{config.cache_key_tag}{_TAG}{ours}"


def _end_trace(_: object) -> None:
    config.cache_key_tag = str(config.cache_key_tag).split(_TAG)[0]
    trace_leases.clear()
    _torch.dynamo.trace_backward_without_autocast(False)


def _watch_compilations() -> None:
    _torch.dynamo.keep_compile_callbacks(_start_trace, _end_trace)


_WITH_CALLEES = ("castwise.core.casting.trees", "castwise.core.model.later")
"""Modules that look into containers of the user's, whose own code runs uncompiled then."""

_contexts: list[tuple[type, Callable[[Any], bool]]] = []


def trace_context(cls: type, as_torchs: Callable[[Any], bool]) -> None:
    """Make Dynamo trace the methods of a subclass of ``torch.autocast``, for instances made outside of compiled code.

    By default Dynamo treats instances of a subclass as plain ``torch.autocast`` objects.

    Args:
        cls: The subclass. Further subclasses of it are not affected.
        as_torchs: Called with an instance. Returns True if Dynamo should still treat it as a plain ``torch.autocast``.
    """
    if frames.watch_compilations is not None:
        _torch.dynamo.trace_context(cls, as_torchs)
    else:
        _contexts.append((cls, as_torchs))


@functools.cache
def get_ready_with_dynamo() -> None:
    """Call :func:`get_ready_for_compile` once Dynamo is imported. This suffices for blocks outside of compiled code."""
    _torch.dynamo.when_dynamo_is_loaded(get_ready_for_compile)


def get_ready_for_compile() -> None:
    """Register with Dynamo what it must know to compile code under a plan.

    This imports Dynamo, which takes about a second and happens anyway at an optimizer's first step.
    """
    if _torch.dynamo.why_not_compile("cpu"):
        return
    _watch_compilations()
    _torch.dynamo.skip_modules("castwise.core", _WITH_CALLEES)
    if frames.watch_compilations is not None:
        return
    frames.watch_compilations = _watch_compilations
    _torch.dynamo.graph_function(graph_push)
    _torch.dynamo.graph_function(graph_pop)
    for cls, as_torchs in _contexts:
        _torch.dynamo.trace_context(cls, as_torchs)
