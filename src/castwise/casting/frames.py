"""Which precision is in force, on this thread, at this point of forward or backward.

A :class:`Frame` is a plan resolved for one device type: the state that ``torch.autocast`` would set, plus the
operator overrides that go beyond torch's own lists. Frames are pushed and popped on a stack that belongs to the
thread, exactly as autocast's own state does.

Two things make this more than a stack.

**Backward.** Activation checkpointing runs a piece of forward again during backward. It restores what torch knows
(enabled, dtype) and not the frame. :func:`mark_boundary` puts an autograd node where a prepared module returns;
its backward runs before any node inside the module and tells this thread which frame the module ran in. Autograd
executes nodes that were made on one thread strictly in reverse order, so nested regions are right too.

A region that was entered by hand has no such place to return from. It notes which numbers autograd gave to the nodes
made inside it, and a recomputation finds its region by the number of the node that asked for it.

**torch.compile.** A frame that is entered outside of a compiled function is part of what Dynamo guards
(``_torch.set_guard_code``) and of the key of the compile caches on disk; one that is entered inside is a node of
the traced graph (:func:`graph_push`). In both cases the override kernels run while the graph is traced, so the
casts are in the graph and eager and compiled code follow one implementation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from castwise import _torch
from castwise.errors import StateError

__all__ = ["Frame", "current_frame", "depth", "mark_boundary", "pop", "push", "suspended", "unwind"]


@dataclass(frozen=True, eq=False)
class Frame:
    """Precision in force for one device type.

    Attributes:
        device_type: ``"cpu"``, ``"cuda"``, ``"xpu"`` or ``"mps"``.
        dtype: What ``lower`` operators compute in; None where nothing is autocast (fp32, or ``rules="none"``).
        surrounding: Floating dtype that a region inside this frame casts its outputs back to.
        rows: Operator name -> rule, beyond torch's lists. Empty for native rules.
        overrides: Operator name -> what to do with it, by ``rows``.
        cache: Whether fp32 weights keep their low-precision copy; None leaves torch's setting as it is.
        key: Text that identifies the frame in a traced graph and in compile caches.
        code: Number that Dynamo guards; 0 for a frame without overrides, which torch's own guards tell apart.
    """

    device_type: str
    dtype: torch.dtype | None
    surrounding: torch.dtype = torch.float32
    rows: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    cache: bool | None = None
    key: str = ""
    code: int = 0

    def __deepcopy__(self, memo: object) -> Frame:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        from castwise.casting.kernels import rebuild_frame  # kernels stands on this module

        return rebuild_frame, (self.device_type, self.dtype, dict(self.rows), self.surrounding, self.cache)

    @property
    def enabled(self) -> bool:
        """Whether operators are autocast in this frame."""
        return self.dtype is not None


class State:
    """One thread's stack: the frame in force, what to restore, copies of weights, the frame of a running backward."""

    __slots__ = ("backward", "frame", "marks", "saved", "weights")

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.backward: _BackwardFrame | None = None
        self.saved: list[tuple[Any, ...]] = []
        self.marks: list[int] = []
        self.weights: dict[Any, Any] = {}


class _Thread(threading.local):
    """Holds the state in one attribute, because every access to a thread-local costs."""

    def __init__(self) -> None:
        self.state = State()


thread = _Thread()

_set_enabled = torch.set_autocast_enabled
_set_dtype = torch.set_autocast_dtype
_get_dtype = torch.get_autocast_dtype
_is_enabled = torch.is_autocast_enabled
_set_cache = torch.set_autocast_cache_enabled
_is_cache = torch.is_autocast_cache_enabled
_increment = torch.autocast_increment_nesting
_decrement = torch.autocast_decrement_nesting
_clear = torch.clear_autocast_cache


def push(frame: Frame, owner: object = None, scope: bool = False) -> None:
    """Put ``frame`` in force on this thread until the matching :func:`pop`.

    Args:
        frame: What to put in force.
        owner: What entered it, for :func:`unwind`.
        scope: Whether this is a scope of its own for the low-precision copies of weights, as each forward of a
            prepared model is; the copies made inside end with it, whatever region lies around.
    """
    state = thread.state
    before = state.frame
    device = frame.device_type
    dtype = frame.dtype
    enabled = _is_enabled(device)
    if dtype is None:
        state.saved.append((before, device, enabled, None, None, state.weights, owner, False))
        if enabled:
            _set_enabled(device, False)
    else:
        old_dtype = _get_dtype(device)
        # torch's cast cache is keyed by the weight alone, so a copy in another format would be taken for ours.
        clear = scope or (enabled and old_dtype is not dtype)
        cache = None if frame.cache is None else _is_cache()
        state.saved.append((before, device, enabled, old_dtype, cache, state.weights, owner, clear))
        if not enabled:
            _set_enabled(device, True)
        if old_dtype is not dtype:
            _set_dtype(device, dtype)
        if frame.cache is not None:
            _set_cache(frame.cache)
        if _increment() > 1 and clear:
            _clear()
    state.frame = frame
    if frame.overrides:
        state.weights = {}
    if frame.code or (before is not None and before.code):
        _torch.set_guard_code(frame.code)
        if _compile_ready:
            _torch.keep_compile_callbacks(_tag_caches, _end_trace)


def pop() -> None:
    """Restore what was in force before the last :func:`push`."""
    state = thread.state
    frame = state.frame
    assert frame is not None, "pop without push"
    before, device, enabled, dtype, cache, state.weights, _, clear = state.saved.pop()
    state.frame = before
    if frame.dtype is None:
        if enabled:
            _set_enabled(device, True)
    else:
        if _decrement() == 0 or clear:
            _clear()
        if cache is not None:
            _set_cache(cache)
        if dtype is not frame.dtype:
            _set_dtype(device, dtype)
        if not enabled:
            _set_enabled(device, False)
    if frame.code or (before is not None and before.code):
        _torch.set_guard_code(0 if before is None else before.code)


_left: deque[tuple[int, int, int, Frame]] = deque(maxlen=4096)
"""Regions with overrides that were left: first and last node made inside, thread, frame. The newest matter: a graph
that is older than this many regions is not recomputed in practice."""


def push_region(frame: Frame) -> None:
    """:func:`push` for a region that is entered by hand."""
    push(frame)
    if frame.overrides:
        thread.state.marks.append(_torch.sequence_number())


def pop_region() -> None:
    """:func:`pop` for a region that was entered by hand."""
    state = thread.state
    frame = state.frame
    if frame is not None and frame.overrides:
        first, last = state.marks.pop(), _torch.sequence_number()
        if last > first:
            _left.append((first, last, threading.get_ident(), frame))
    pop()


def left_region() -> Frame | None:
    """The frame of the region by hand whose nodes are running backward on this thread now."""
    number = _torch.running_node_number() if _left else None
    if number is None:
        return None
    here = threading.get_ident()
    best, found = -1, None
    for first, last, made_by, frame in reversed(_left):
        # Numbers are counted per thread. The CPU's nodes run on the thread that calls backward; a device has its own.
        if made_by != here and frame.device_type == "cpu":
            continue
        if last <= number:
            break
        if best < first <= number:
            best, found = first, frame  # of regions inside one another the innermost began last
    return found


ambient: dict[str, Frame] = {}
"""Frames in force for the whole process, by device type: those of a drop-in whose casting ends when it is told to.

The thread that entered one has it on its stack. Other threads find it here where torch has handed them the state of
autocast alone: in the replicas of DataParallel, and where a device's thread recomputes a checkpointed forward."""


def depth() -> int:
    """How many frames are on this thread's stack."""
    return len(thread.state.saved)


def unwind(to: int = 0, owner: object = None) -> None:
    """Leave frames that were never popped, as after an interrupted forward.

    Args:
        to: Depth of the stack to go back to.
        owner: Go back to before this owner entered instead, where it is on the stack.
    """
    if owner is not None:
        for index, entry in enumerate(thread.state.saved):
            if entry[6] is owner:
                to = index
                break
        else:
            return
    while len(thread.state.saved) > to:
        pop()


def clear_weight_cache() -> None:
    """Forget low-precision copies of weights; called when a step has changed the weights."""
    weights = thread.state.weights
    if weights:
        weights.clear()
    _clear()


class suspended:  # noqa: N801 - a context manager, named as one
    """Turn autocasting off on one device type for the length of a block; cheaper than a frame."""

    __slots__ = ("_device", "_was")

    def __init__(self, device_type: str) -> None:
        self._device = device_type

    def __enter__(self) -> None:
        self._was = _is_enabled(self._device)
        _set_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        _set_enabled(self._device, self._was)


# --- backward -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _BackwardFrame:
    task: int
    frame: Frame | None
    depth: int
    outer: _BackwardFrame | None


_live_tasks: set[int] = set()


def current_frame() -> Frame | None:
    """The frame in force on this thread, in forward or in a recomputation during backward."""
    if thread.state.backward is None:
        return thread.state.frame
    entry: _BackwardFrame | None = thread.state.backward
    inside = _torch.graph_task_id() != -1
    while entry is not None and not (inside and entry.task in _live_tasks):
        entry = entry.outer
    thread.state.backward = entry
    if entry is None or len(thread.state.saved) != entry.depth:
        return thread.state.frame
    return entry.frame


def _enter_backward(frame: Frame | None) -> None:
    task = _torch.graph_task_id()
    entry = thread.state.backward
    if entry is not None and entry.task == task:
        entry.frame = frame
        entry.depth = len(thread.state.saved)
        return
    if task not in _live_tasks:
        _live_tasks.add(task)
        _torch.on_graph_task_end(lambda: _live_tasks.discard(task))
    thread.state.backward = _BackwardFrame(task, frame, len(thread.state.saved), entry)


class _Boundary(torch.autograd.Function):
    """Identity whose backward says which frame the nodes before it (in forward order) were made in."""

    @staticmethod
    def forward(ctx: Any, frame: Frame | None, tensor: torch.Tensor) -> torch.Tensor:
        ctx.frame = frame
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        _enter_backward(ctx.frame)
        return None, gradient


def mark_boundary(tensor: torch.Tensor, frame: Frame | None) -> torch.Tensor:
    """Remember for backward that what made ``tensor`` ran in ``frame``.

    Args:
        tensor: Output of a module, any shape and dtype; returned as it is where no gradient will flow.
        frame: Frame of the nodes that lie before the tensor.

    Returns:
        A view of the tensor.
    """
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    out: torch.Tensor = _Boundary.apply(frame, tensor)  # type: ignore[no-untyped-call]
    return out


# --- torch.compile ------------------------------------------------------------------------------------------

graph_frames: dict[str, Frame] = {}
"""Frames that traced graphs may name, by key; filled by whoever resolves a plan."""

_code_of_key: dict[str, int] = {}
_lock = threading.Lock()


def code_for(key: str) -> int:
    """A number for Dynamo's guard that is this key's alone in this process.

    Raises:
        StateError: After some 2,700 different sets of overrides; sharing a number would run the wrong casts.
    """
    with _lock:
        code = _code_of_key.setdefault(key, len(_code_of_key) + 1)
    if code > _torch.MAX_GUARD_CODE:
        raise StateError(
            f"autocast: more than {_torch.MAX_GUARD_CODE} different sets of operator overrides in one process; "
            "torch.compile could no longer tell them apart. Start a new process."
        )
    return code


def _graph_push(key: str) -> None:
    trace = _torch.DynamoTrace.current()
    if trace is not None:
        level = len(thread.state.saved)
        trace.hold(lambda: unwind(level))
    push(graph_frames[key])


def _graph_pop() -> None:
    trace = _torch.DynamoTrace.current()
    if trace is not None:
        trace.release()
    pop()


graph_push: Callable[[str], None] = _graph_push
graph_pop: Callable[[], None] = _graph_pop
trace_leases: list[Any] = []
"""Override kernels of regions inside a function that is being compiled, needed until its graph has been traced."""
_compile_ready = False


def _tag_caches(_: object) -> None:
    """Put the frame in force into the key of the compile caches on disk."""
    frame = thread.state.frame
    tag = _torch.get_cache_tag()
    user = tag.split("|castwise:")[0]
    _torch.set_cache_tag(f"{user}|castwise:{frame.key}" if frame is not None and frame.overrides else user)


def _end_trace(_: object) -> None:
    trace_leases.clear()


_BETWEEN_GRAPHS = tuple(
    f"castwise.{name}" for name in ("_torch", "casting", "borders", "rules", "plan", "masters", "scaler")
)


def get_ready_for_compile() -> None:
    """Teach Dynamo about frames; imports it (about a second, which any optimizer's first step pays anyway)."""
    global _compile_ready
    _torch.keep_compile_callbacks(_tag_caches, _end_trace)
    _torch.skip_modules(_BETWEEN_GRAPHS)
    if _compile_ready:
        return
    _compile_ready = True
    _torch.graph_function(_graph_push)
    _torch.graph_function(_graph_pop)
