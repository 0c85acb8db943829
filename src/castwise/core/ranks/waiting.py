"""Warn within seconds if a rank waits for others, and name the missing ranks, long before torch.distributed's timeout.

One thread per process watches the waits of this process. A rank that has waited for a second writes so to the store of
the process group. Other ranks can then distinguish it from a missing rank. A training step itself only records the
start and the end of its wait.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from castwise.core import _torch, devices
from castwise.core.ranks.text import named
from castwise.errors import is_users

POSTED_AFTER_S = 1.0
"""The time in seconds after which a waiting rank writes a message to the process group's store, for other ranks to read."""
SAID_AFTER_S = 5.0
"""The time in seconds after which a waiting rank warns the user."""
_TICK_S = 0.25
_ALIVE_S = 1.0
"""The time in seconds within which a waiting rank writes its message again, which shows that its process has not ended."""
_MOST_RANKS = 1024
"""The size of the largest group whose ranks query the store, since one process answers the queries of all ranks."""

_waits: dict[int, Waiting] = {}
_process = 0
"""The id of the process that started the watching thread. A forked child has no such thread and starts its own."""
_registry: dict[Any, Any] = {}
"""The registry in which Python's ``warnings`` module records warnings that were already shown."""


class Waiting:
    """A context manager for code that waits for the other ranks of a group.

    It warns after 5 seconds and names the missing ranks. If an error is raised after that, the same text is added to
    the error as a note.

    Args:
        group: The process group; None for all ranks.
    """

    __slots__ = ("_beats", "_event", "_first", "_group", "_said", "_since", "_thread")

    def __init__(self, group: Any) -> None:
        self._group = group
        self._beats = 0
        self._first: dict[int, bytes] | None = None
        self._said = ""
        self._event: torch.Event | None = None

    def __enter__(self) -> Self:
        self._thread, self._since = threading.get_ident(), time.monotonic()
        _waits[id(self)] = self
        if _process != os.getpid():
            _start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._event is None:
            self._end()
        if error is not None and self._said:
            error.add_note(self._said)

    def on_device(self, tensor: Tensor) -> None:
        """Keep watching after the ``with`` block until ``tensor`` is ready, if it is on a device. Call inside the block.

        This is needed because a collective on a device is only queued when its call returns.
        """
        if not tensor.is_cpu:
            self._event = devices.event(tensor.device)

    def _end(self) -> None:
        _waits.pop(id(self), None)
        if self._beats:
            with contextlib.suppress(Exception):  # the store ends with the process that hosts it
                _torch.distributed.default_store().set(self._key(dist.get_rank()), "")

    # --- on the thread that watches the waits ------------------------------------------------------------------

    def look(self) -> None:
        """End the wait if its device event has occurred; otherwise tell the other ranks or warn the user if it is time."""
        if self._event is not None and self._event.query():
            self._end()
            return
        waited = time.monotonic() - self._since
        if waited < POSTED_AFTER_S:
            return
        name, frame = _call_of(None if self._event is not None else self._thread)
        self._beats += 1
        if id(self) in _waits:
            _torch.distributed.default_store().set(
                self._key(dist.get_rank()), f"{self._beats} {name}{_place(frame)}"
            )
        if self._said or waited < SAID_AFTER_S - _ALIVE_S:
            return
        if self._first is None:
            self._first = self._posts()
        elif waited >= SAID_AFTER_S:
            self._say(name, frame)

    def _members(self) -> list[int]:
        return dist.get_process_group_ranks(dist.group.WORLD if self._group is None else self._group)

    def _key(self, rank: int) -> str:
        return f"castwise/waits/{','.join(map(str, self._members()))}/{rank}"

    def _posts(self) -> dict[int, bytes]:
        """Return the texts that waiting ranks of the group have written to the store, by rank."""
        store, found = _torch.distributed.default_store(), {}
        members = self._members()
        for rank in members if len(members) <= _MOST_RANKS else ():
            if rank != dist.get_rank() and store.check([self._key(rank)]):
                found[rank] = store.get(self._key(rank))
        return found

    def _say(self, name: str, frame: FrameType | None) -> None:
        first, now, me = self._first or {}, self._posts(), dist.get_rank()
        elsewhere: dict[int, str] = {}
        missing = []
        for rank in self._members():
            post = now.get(rank, b"")
            if rank == me:
                continue
            if post == first.get(rank, b""):  # no message, or one left by a process that has ended
                missing.append(rank)
            elif (call := post.decode().partition(" ")[2]).partition(" ")[0] != name:
                elsewhere[rank] = call
        if not missing and not elsewhere:
            return  # all ranks have made this call, so only the transfer of data takes long
        who = (
            f"{named(missing)}, which {'have' if len(missing) > 1 else 'has'} not made this call"
            if missing
            else ""
        )
        others = "; ".join(f"rank {rank} waits in {call}" for rank, call in [*elsewhere.items()][:4])
        self._said = (
            f"{name}: rank {me} has waited {SAID_AFTER_S:g} s for {'; '.join(filter(None, (who, others)))}. All ranks of a session must "
            "make the same calls: look on those ranks for an error, a shorter loop, a missing call or slow work. Ranks that "
            "train separately need Amp(plan, group=...)"
        )
        file, line = (__file__, 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        try:
            warnings.warn_explicit(self._said, UserWarning, file, line, registry=_registry)
        except UserWarning:  # with warnings as errors, the exception would end this thread
            print(f"castwise: {self._said}", file=sys.stderr, flush=True)


def _start() -> None:
    global _process
    _process = os.getpid()
    threading.Thread(target=_look_at_all, name="castwise-waits", daemon=True).start()


def _look_at_all() -> None:
    while True:
        time.sleep(_TICK_S)
        for waiting in list(_waits.values()):
            with contextlib.suppress(
                Exception
            ):  # the store or group is gone; the waiting call gets that error itself
                waiting.look()


def _call_of(thread: int | None) -> tuple[str, FrameType | None]:
    """Return the name of the castwise function that a thread is running, and the stack frame of user code that called it.

    Without a thread, the name is ``step`` and the frame is None.
    """
    name, frame = "step", None if thread is None else sys._current_frames().get(thread)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_globals.get("__name__", "").startswith("castwise."):
            name = frame.f_code.co_name
        frame = frame.f_back
    return ("step" if name.startswith("_") else name), frame


def _place(frame: FrameType | None) -> str:
    return "" if frame is None else f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
