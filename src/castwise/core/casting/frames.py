"""Keep the precision settings that are active on each thread during forward.

A :class:`Frame` is a plan resolved for one device type. It holds the state that ``torch.autocast`` would set, and the
operator rules that differ from torch's lists. Each thread has a stack of frames, as it has a stack of autocast states.
The module ``backward`` handles the active frame while a forward is recomputed.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from castwise.core import _torch
from castwise.errors import StateError


@dataclass(frozen=True, eq=False)
class Frame:
    """The precision settings that a plan puts in force for one device type.

    Attributes:
        device_type: The type of device whose operators are cast, such as ``"cpu"`` or ``"cuda"``.
        dtype: Compute dtype of the operators with the rule ``lower``. None if nothing is autocast, as with fp32 or
            ``rules="none"``.
        surrounding: Floating dtype to which a :class:`~castwise.Region` inside this frame casts its outputs.
        rows: Maps operator names to their rules, where these differ from torch's lists. Empty for native rules.
        overrides: Maps the operator names of ``rows`` to the functions that carry the rules out.
        cache: Whether the low-precision copies of fp32 weights are cached. None leaves torch's setting unchanged.
        key: Text that identifies the frame in a traced graph and in compile caches.
        code: Number that Dynamo guards. 0 for a frame without overrides, which torch's own guards distinguish.
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
        """Whether operators are autocast while this frame is active."""
        return self.dtype is not None


@dataclass(eq=False)
class BackwardFrame:
    """The :class:`Frame` in which a backward pass recomputes forwards.

    Attributes:
        task: Number of the backward pass.
        frame: The frame, or None for no precision settings.
        depth: Depth of the thread's stack of frames when backward activated the frame. The frame is in force only while
            the stack has this depth.
        outer: The frame of the backward pass around this one, if any.
    """

    task: int
    frame: Frame | None
    depth: int
    outer: BackwardFrame | None


class State:
    """The precision state of one thread.

    ``frame`` is the active :class:`Frame`, and ``backward`` is the frame of a running backward pass. ``saved`` has an
    entry for each :func:`push` without its :func:`pop`, which holds the state before the push: the frame, the device
    type, whether autocast was enabled, its dtype, its cache setting, and the copies of weights. Three more items
    follow: the owner, whether the pop clears torch's cache, and where the frame was entered. The last is the Python
    frame that called a hook, or for an autocast block the sequence number of its first autograd node.

    ``weights`` holds cached low-precision copies of weights from the push of a frame with overrides until its pop. At
    other times, such as in a recomputation during backward, it is None, since nothing would drop the copies.
    """

    __slots__ = ("__weakref__", "backward", "frame", "saved", "weights")

    def __init__(self) -> None:
        self.frame: Frame | None = None
        self.backward: BackwardFrame | None = None
        self.saved: list[tuple[Any, ...]] = []
        self.weights: dict[Any, Any] | None = None


class _Thread(threading.local):
    """A thread-local with one attribute, which holds all state.

    Each access to an attribute of a thread-local takes time.
    """

    def __init__(self) -> None:
        self.state = State()
        states.add(self.state)


states: weakref.WeakSet[State] = weakref.WeakSet()
"""The states of all threads."""
thread = _Thread()

watch_compilations: Callable[[], None] | None = None
"""A function to call when a :class:`Frame` is activated of which torch.compile must know.

The module ``tracing`` sets it once Dynamo is loaded."""

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
    """Make a :class:`Frame` active on this thread until the matching :func:`pop`.

    This changes torch's autocast state as well. If an error is raised, nothing has changed.

    Args:
        frame: The frame to activate.
        owner: The object that enters the frame, by which :func:`leave` finds it. If the caller of this function is a
            module's hook, the caller of the hook counts as the running forward; see :func:`leave_interrupted`.
        scope: Whether this is the forward of a whole model. Such a forward has a separate cache of low-precision
            weights, which is dropped when the forward ends, even inside an autocast block.
        where: For an autocast block, the sequence number of the first autograd node inside. The owner of a block is its
            frame.
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
        if (scope or where is not None or frame.code) and watch_compilations is not None:
            watch_compilations()
    except BaseException:
        pop()
        raise


def pop() -> None:
    """Undo the last :func:`push` on this thread, which restores the active :class:`Frame` and torch's autocast state."""
    state = thread.state
    frame = state.frame
    assert frame is not None, "pop without push"
    before, device, enabled, dtype, cache, state.weights, _, clear, entered = state.saved.pop()
    state.frame = before
    if frame.dtype is not None:
        if _decrement() == 0 or clear:
            _clear()
        if cache is not None:
            _set_cache(cache)
        if _get_dtype(device) is not dtype:  # code inside the block may have set it
            _set_dtype(device, dtype)
    if _is_enabled(device) is not enabled:
        _set_enabled(device, enabled)
    if frame.code or (before is not None and before.code):
        _torch.dynamo.set_guard_code(0 if before is None else before.code)
    if (
        _tells_apart(frame, before)
        and type(entered) is int
        and (last := _torch.autograd.sequence_number()) > entered
    ):
        left_blocks.append((entered, last, threading.get_ident(), frame))
    if state.saved and state.saved[-1][6] is _LEFT:
        pop()


_LEFT = object()
"""The owner of an entry that was left while other entries were above it on the stack.

It is popped together with them.
"""
left_blocks: deque[tuple[int, int, int, Frame]] = deque(maxlen=4096)
"""The autocast blocks with operator overrides, or inside of such a block, that were left.

For each block: the sequence number of its first autograd node, the number after its last node, the thread, and the frame.
Only the newest blocks are kept, since a graph that is older than so many blocks is not recomputed in practice."""


_STEPS, _BLOCKS = 8, 64
_kept: deque[tuple[int, object]] = deque(maxlen=_BLOCKS)
_kept_for: object = None


def keep(lease: object) -> None:
    """Keep the kernels of the autocast block that was left last, as a backward pass after it may recompute parts of it.

    They are kept for so many steps of any optimizer, and for so many blocks. The object of a block in a ``with`` statement may
    be gone by then. Does nothing for a block in which no autograd node was created.
    """
    global _kept_for
    newest = left_blocks[-1] if left_blocks else None
    if newest is not _kept_for:
        _kept_for = newest
        _kept.append((steps, lease))


def leave(owner: object) -> bool:
    """Undo the last :func:`push` of ``owner`` on this thread, and later pushes of forwards that were interrupted.

    A frame that was pushed after ``owner`` and belongs to code that still runs stays active. This happens when a
    generator that has entered an autocast block ends.

    Returns:
        Whether the call that ends now had pushed a frame of ``owner``. If a model calls itself, another hook of the
        inner call may raise before the hook that pushes. Then the frame belongs to the outer call and stays.
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
            # The entry belongs to an enclosing call. The exception is checked because after a graph break Dynamo
            # leaves from another frame than it entered from, but without an exception.
            return False
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
    """Undo each :func:`push` of a forward that was ended by KeyboardInterrupt, SystemExit or a cancelled task.

    torch calls forward hooks after an ``Exception``, but not after these three, so nothing else undoes the push.
    While a forward runs, the Python frame that called its hook is on the call stack of this function. If that frame
    is not there, the forward has ended. This function is called wherever an autocast block or the forward of a whole
    model begins or ends, so the precision settings of an interrupted forward stay active only until then.
    """
    saved = thread.state.saved
    while saved:
        entered = saved[-1][8]
        if not isinstance(entered, FrameType) or _runs(entered, sys._getframe(1)):
            return
        pop()


def _runs(entered: object, running: FrameType | None) -> bool:
    """Whether the Python frame ``entered`` is the Python frame ``running`` or one of its callers."""
    while running is not None:
        if running is entered:
            return True
        running = running.f_back
    return False


def push_block(frame: Frame) -> None:
    """Make a :class:`Frame` active on this thread, for an autocast block that the user opens with ``castwise.autocast``."""
    # If a recomputation opens a plain block, the number shows that it is newer than the block of the original forward.
    numbered = bool(left_blocks) or _tells_apart(frame, thread.state.frame)
    push(frame, frame, False, _torch.autograd.sequence_number() if numbered else 0)


def _tells_apart(frame: Frame, around: Frame | None) -> bool:
    """Whether operators are cast by another rule inside of a block than by torch.autocast or in the block around it."""
    return bool(frame.overrides) or (around is not None and bool(around.overrides))


def _all_states() -> list[State]:
    while True:
        try:
            return [*states]
        except RuntimeError:  # another thread has just run castwise for the first time
            continue


def open_elsewhere() -> Iterator[tuple[int, Frame]]:
    """The autocast blocks that other threads have entered, as those from which a device's thread runs a backward pass.

    For each block: the sequence number of its first autograd node, and its frame.
    """
    for state in _all_states():
        saved = [*state.saved]
        if state is thread.state or not saved:
            continue
        inside = [*(entry[0] for entry in saved[1:]), state.frame]
        for entry, frame in zip(saved, inside, strict=True):
            if frame is not None and type(entry[8]) is int and _tells_apart(frame, entry[0]):
                yield entry[8], frame


def pop_block(frame: Frame | None = None) -> None:
    """Undo :func:`push_block` for the autocast block of ``frame``, or for the block entered last if ``frame`` is None.

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
"""The frames that :class:`AmbientAutocast` has made active in the whole process, by device type.

The thread that entered such a frame also has it on its stack. Other threads find the frame here if torch has passed them
only the autocast state. This happens in replicas of DataParallel, and when a device's thread recomputes a checkpointed
forward."""


def only_modules() -> bool:
    """Whether each :func:`push` on this thread was made by a module's hook.

    The backward of such a forward runs without autocast in eager mode, unless a user's block encloses it as well.
    """
    saved = thread.state.saved
    return bool(saved) and all(isinstance(entry[8], FrameType) for entry in saved)


def depth() -> int:
    """Return how many :func:`push` calls on this thread have had no :func:`pop` yet."""
    return len(thread.state.saved)


def unwind(to: int = 0) -> None:
    """Undo :func:`push` calls on this thread until ``to`` of them are left, for example after an interrupted forward."""
    while len(thread.state.saved) > to:
        pop()


steps = 0
"""How often optimizer steps have changed weights, on any thread.

A cached copy from before the last step is not used.
"""


def clear_weight_cache(*_: object) -> None:
    """Drop the low-precision copies of weights that castwise and torch have cached, after weights were changed.

    castwise's copies are invalid on all threads from then on.
    """
    global steps
    steps += 1
    while _kept and _kept[0][0] + _STEPS <= steps:
        _kept.popleft()
    weights = thread.state.weights
    if weights:
        weights.clear()
    _clear()


@functools.cache
def watch_steps() -> None:
    """Call :func:`clear_weight_cache` after each later step of any torch optimizer.

    Version counters do not suffice to detect changed weights, since fused kernels do not raise them.
    """
    _torch.steps.subscribe(after=clear_weight_cache)


class suspended:  # noqa: N801 - a context manager, named as one
    """A context manager that turns autocast off for one device type. It is cheaper than pushing a :class:`Frame`."""

    __slots__ = ("_device", "_was")

    def __init__(self, device_type: str) -> None:
        self._device = device_type

    def __enter__(self) -> None:
        self._was = _is_enabled(self._device)
        _set_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        _set_enabled(self._device, self._was)
