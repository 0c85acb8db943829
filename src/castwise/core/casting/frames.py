"""The active precision of each thread during forward.

A :class:`Frame` is a plan resolved for one device type: the state that ``torch.autocast`` would set, plus the
operator overrides beyond torch's lists. Frames are pushed and popped on a stack per thread, as autocast's
state is. ``backward`` handles the active frame while a forward is recomputed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from castwise.core import _torch
from castwise.errors import StateError


@dataclass(frozen=True, eq=False)
class Frame:
    """Precision in force for one device type.

    Attributes:
        device_type: ``"cpu"``, ``"cuda"``, ``"xpu"`` or ``"mps"``.
        dtype: Compute dtype of ``lower`` operators; None if nothing is autocast (fp32, or ``rules="none"``).
        surrounding: Floating dtype to which a region inside this frame casts its outputs.
        rows: Operator name -> rule, beyond torch's lists. Empty for native rules.
        overrides: Operator name -> action, by ``rows``.
        cache: Whether fp32 weights keep their low-precision copy; None leaves torch's setting unchanged.
        key: Text that identifies the frame in a traced graph and in compile caches.
        code: Number that Dynamo guards; 0 for a frame without overrides, which torch's guards distinguish.
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

    @property
    def enabled(self) -> bool:
        """Whether operators are autocast in this frame."""
        return self.dtype is not None


@dataclass(eq=False)
class BackwardFrame:
    """The frame for forwards that a backward recomputes, in one graph task, unless another frame was pushed later."""

    task: int
    frame: Frame | None
    depth: int
    outer: BackwardFrame | None


class State:
    """One thread's stack: the active frame, what to restore, copies of weights, the frame of a running backward.

    An entry of ``saved`` is the state before a :func:`push`: frame, device type, whether autocast was enabled, its
    dtype, its cache setting, copies of weights; then the owner, whether leaving clears torch's cache, and where it was
    entered: the Python frame that called a hook, or for a block the number of its first node.

    Copies of weights are kept between a push of a frame with overrides and its pop; outside of that, such as in a
    recomputation during backward, nothing would drop them.
    """

    __slots__ = ("backward", "frame", "saved", "weights")

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.backward: BackwardFrame | None = None
        self.saved: list[tuple[Any, ...]] = []
        self.weights: dict[Any, Any] | None = None


class _Thread(threading.local):
    """Holds the state in one attribute, since each access to a thread-local takes time."""

    def __init__(self) -> None:
        self.state = State()


thread = _Thread()

watch_compilations: Callable[[], None] | None = None
"""Called when a frame is activated that torch.compile must distinguish; set by ``tracing`` once Dynamo is loaded."""

_set_enabled = torch.set_autocast_enabled
_set_dtype = torch.set_autocast_dtype
_get_dtype = torch.get_autocast_dtype
_is_enabled = torch.is_autocast_enabled
_set_cache = torch.set_autocast_cache_enabled
_is_cache = torch.is_autocast_cache_enabled
_increment = torch.autocast_increment_nesting
_decrement = torch.autocast_decrement_nesting
_clear = torch.clear_autocast_cache


def push(frame: Frame, owner: object = None, scope: bool = False, where: int | None = None) -> None:
    """Make ``frame`` active on this thread until the matching :func:`pop`; if that fails, nothing has changed.

    Args:
        frame: The frame to activate.
        owner: The object that enters it, for :func:`leave` and :func:`unwind`. If it is a hook, its caller counts as
            the running forward, see :func:`leave_interrupted`.
        scope: Whether this is the forward of a whole model, which has a separate cache of low-precision
            weights that ends with it, even inside a block.
        where: For a block, the number of the first autograd node inside; its owner is the frame.
    """
    state = thread.state
    saved = state.saved
    if saved and (scope or where is not None):
        leave_interrupted()
    before = state.frame
    device = frame.device_type
    dtype = frame.dtype
    enabled = _is_enabled(device)
    entered: Any = where
    if where is None and owner is not None:
        entered = sys._getframe(2)
    if dtype is None:
        saved.append((before, device, enabled, None, None, state.weights, owner, False, entered))
    else:
        old_dtype = _get_dtype(device)
        # torch's cast cache is keyed by the weight alone, so a copy in another format would be used here.
        clear = scope or (enabled and old_dtype is not dtype)
        cache = None if frame.cache is None else _is_cache()
        saved.append((before, device, enabled, old_dtype, cache, state.weights, owner, clear, entered))
        if _increment() > 1 and clear:
            _clear()
    state.frame = frame
    try:
        if dtype is None:
            if enabled:
                _set_enabled(device, False)
        else:
            if not enabled:
                _set_enabled(device, True)
            if old_dtype is not dtype:
                _set_dtype(device, dtype)
            if frame.cache is not None:
                _set_cache(frame.cache)
        if frame.overrides:
            state.weights = {}
        if frame.code or (before is not None and before.code):
            _torch.dynamo.set_guard_code(frame.code)
            if watch_compilations is not None:
                watch_compilations()
    except BaseException:
        pop()
        raise


def pop() -> None:
    """Restore the frame from before the last :func:`push`."""
    state = thread.state
    frame = state.frame
    assert frame is not None, "pop without push"
    before, device, enabled, dtype, cache, state.weights, _, clear, entered = state.saved.pop()
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
        _torch.dynamo.set_guard_code(0 if before is None else before.code)
    if frame.overrides and type(entered) is int and (last := _torch.autograd.sequence_number()) > entered:
        left_blocks.append((entered, last, threading.get_ident(), frame))
    if state.saved and state.saved[-1][6] is _LEFT:
        pop()


_LEFT = object()
"""Owner of an entry that was left while others were above it; it is popped with them."""
left_blocks: deque[tuple[int, int, int, Frame]] = deque(maxlen=4096)
"""Blocks with overrides that were left: first and last node created inside, thread, frame. Only the newest are kept:
a graph older than this many blocks is not recomputed in practice."""


def leave(owner: object) -> bool:
    """Restore the frame from before ``owner`` last entered, and drop interrupted forwards above it.

    Returns:
        Whether the call that ends now had put ``owner`` on this thread's stack: if a model calls itself, another hook
        may raise before this hook enters. A frame that was entered after ``owner`` and is still active stays active, as
        when a generator that entered a block ends.
    """
    saved = thread.state.saved
    if saved and saved[-1][6] is not owner:
        leave_interrupted()
    for index in range(len(saved) - 1, -1, -1):
        entry = saved[index]
        if entry[6] is not owner:
            continue
        if (
            sys.exc_info()[0] is not None
            and entry[8] is not (caller := sys._getframe(2))
            and _runs(entry[8], caller)
        ):
            return False  # of an enclosing call; after a graph break Dynamo leaves from another frame, without an exception
        if index == len(saved) - 1:
            pop()
            return True
        saved[index] = (*entry[:6], _LEFT, *entry[7:])
        if all(above[1] != entry[1] for above in saved[index + 1 :]):  # no entry above is for its device
            _set_enabled(entry[1], entry[2])
            if entry[3] is not None:
                _set_dtype(entry[1], entry[3])
        return True
    return False


def leave_interrupted() -> None:
    """Drop the frames of forwards that were ended by KeyboardInterrupt, SystemExit or a cancelled task.

    torch calls forward hooks after an ``Exception`` but not after those. While a forward runs, the caller of its hook
    is on the Python stack, below the caller of this function; if it is not, the forward has ended. Called wherever a
    block or the forward of a whole model begins or ends, so that a stale frame stays active no longer than that.
    """
    saved = thread.state.saved
    while saved:
        entered = saved[-1][8]
        if not isinstance(entered, FrameType) or _runs(entered, sys._getframe(1)):
            return
        pop()


def _runs(entered: object, running: FrameType | None) -> bool:
    """Whether a Python frame is ``running`` or one of its callers."""
    while running is not None:
        if running is entered:
            return True
        running = running.f_back
    return False


def push_block(frame: Frame) -> None:
    """:func:`push` for a block that the user opens with ``castwise.autocast``."""
    push(frame, frame, False, _torch.autograd.sequence_number() if frame.overrides else 0)


def pop_block(frame: Frame | None = None) -> None:
    """:func:`pop` for a block: the block of ``frame``, or else the block entered last.

    Raises:
        StateError: The block is not active on this thread.
    """
    saved = thread.state.saved
    if frame is not None and saved and saved[-1][6] is frame:
        pop()
        return
    if frame is None:
        leave_interrupted()
        frame = saved[-1][6] if saved else None
    if not leave(frame):
        raise StateError(
            "autocast: a block was left on another thread than the one that entered it; enter and leave it on one thread, "
            "preferably with a `with` statement"
        )


ambient: dict[str, Frame] = {}
"""Frames active in the whole process, by device type, from :class:`AmbientAutocast`. The thread that entered a frame has
it on its stack. Other threads find it here if torch has passed them only the autocast state: in replicas of
DataParallel, and when a device's thread recomputes a checkpointed forward."""


def depth() -> int:
    """How many frames are on this thread's stack."""
    return len(thread.state.saved)


def unwind(to: int = 0) -> None:
    """Drop frames that were never popped, as after an interrupted forward, until the stack is ``to`` deep."""
    while len(thread.state.saved) > to:
        pop()


steps = 0
"""How often steps have changed weights, on any thread; a copy older than the last one is not used."""


def clear_weight_cache(*_: object) -> None:
    """Drop low-precision copies of weights on all threads, torch's too; called when a step changed the weights."""
    global steps
    steps += 1
    weights = thread.state.weights
    if weights:
        weights.clear()
    _clear()


@functools.cache
def watch_steps() -> None:
    """Call :func:`clear_weight_cache` after each step of any torch optimizer, since fused kernels raise no version counter."""
    _torch.steps.subscribe(after=clear_weight_cache)


class suspended:  # noqa: N801 - a context manager, named as one
    """Turn autocasting off on one device type inside a block; cheaper than a frame."""

    __slots__ = ("_device", "_was")

    def __init__(self, device_type: str) -> None:
        self._device = device_type

    def __enter__(self) -> None:
        self._was = _is_enabled(self._device)
        _set_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        _set_enabled(self._device, self._was)
