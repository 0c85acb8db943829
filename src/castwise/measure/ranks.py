"""Ranks that measure together: the one place where the ranks of a search come to agree.

Every rank runs the same code. What can differ between them (a time, a clock, what a pass gave, whether it failed) goes
through here, so that all go on with the same numbers and take the same decisions. Outside of :func:`lockstep`, or with
one process, nothing is exchanged and each function hands back what this process has.

There is one kind of exchange, so ranks cannot wait for each other in different ones: each sends what it has and where it
stands, and hears all others. It runs in a gloo group of its own on the CPU, whatever the backend of the default group:
nothing of it lies on the device that is measured, and it does not get between the collectives of a user's loss. A rank
that leaves early writes why into the group's store and closes its connections; the others find them closed and read it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from castwise.errors import StateError
from castwise.measure.failures import cannot_run, unfit
from castwise.ranks.group import ALONE, Ranks, first_line, running

__all__ = ["alike", "count", "each", "lockstep", "now", "rank", "same", "slowest", "together", "worst"]

T = TypeVar("T")
_CURE = "give every rank the same model, batches and arguments"


class _Gone(BaseException):
    """Another rank has left. No ``Exception``: nobody may take it for the failure of a candidate and go on alone."""


class _Meeting(Ranks):
    """All ranks, in a group of their own, where they meet for one exchange."""

    def __init__(self, call: str) -> None:
        try:
            super().__init__(dist.new_group(backend="gloo"))
        except RuntimeError as error:
            raise StateError(
                f"{call}: not all {dist.get_world_size()} ranks came ({first_line(error)}); call it on every rank of the process "
                "group, or before init_process_group"
            ) from error
        self._what = ""

    def at(self, what: str) -> Ranks:
        """The same, for another exchange."""
        other = copy.copy(self)
        other._what = what
        return other

    def gather(self, value: T) -> list[T]:
        try:
            heard = super().gather((self._what, value))
        except RuntimeError as error:
            raise self._absence(error) from None
        places = [place for place, _ in heard]
        if len(set(places)) > 1:
            where = ", ".join(f"rank {at} at {place}" for at, place in enumerate(places))
            raise _Gone(f"the ranks went separate ways: {where}; {_CURE}")
        return [sent for _, sent in heard]

    def _reason(self, failure: Exception) -> str:
        return unfit(failure)

    def _cannot_run(self, failure: Exception) -> bool:
        return cannot_run(failure)

    def _absence(self, error: RuntimeError) -> BaseException:
        """Why ranks are missing, as they said themselves."""
        try:
            store = self.group.get_group_store()
            for at in range(self.size):
                if store.check([f"left/{at}"]):
                    said = json.loads(store.get(f"left/{at}"))
                    if said["interrupted"]:
                        return KeyboardInterrupt(f"rank {at} was interrupted")
                    return _Gone(f"rank {at} ended it: {said['words']}")
        except RuntimeError:  # the store has gone with the rank that kept it
            pass
        return _Gone(f"another rank has gone without a word ({first_line(error)})")

    def leave(self, error: BaseException) -> None:
        """Say why this rank leaves before the end."""
        said = {
            "interrupted": isinstance(error, KeyboardInterrupt),
            "words": f"{type(error).__name__}: {first_line(error)}",
        }
        with contextlib.suppress(RuntimeError):
            self.group.get_group_store().set(f"left/{self.rank}", json.dumps(said))

    def close(self) -> None:
        """Let go of the connections, which wakes whoever waits for this rank."""
        dist.destroy_process_group(self.group)
        self.group = None


_meeting: _Meeting | None = None


@contextlib.contextmanager
def lockstep(call: str) -> Iterator[None]:
    """Make the ranks of the process group agree on all that this module is asked inside; collective.

    Nothing happens without torch.distributed, with one process, or inside of another ``lockstep``.

    Raises:
        StateError: Another rank has left, or never came.
        KeyboardInterrupt: Another rank was interrupted.
    """
    global _meeting
    if _meeting is not None or not running() or dist.get_world_size() == 1:
        yield
        return
    meeting = _meeting = _Meeting(call)
    try:
        yield
        _at("the end").gather(None)  # nobody closes while another still asks
    except _Gone as gone:
        raise StateError(f"{call}: {gone}") from None
    except BaseException as error:
        meeting.leave(error)
        raise
    finally:
        _meeting = None
        meeting.close()


def _at(what: str) -> Ranks:
    return Ranks(ALONE) if _meeting is None else _meeting.at(what)


def count() -> int:
    """How many ranks measure together; 1 outside of :func:`lockstep`."""
    return _at("").size


def rank() -> int:
    """Which of them this process is; 0 outside of :func:`lockstep`."""
    return _at("").rank


def together(what: str, work: Callable[[], T]) -> list[T]:
    """Run something on every rank and wait for all; what it returned, by rank, is pickled on its way. Collective.

    ``what`` it is has to be the same on all ranks.

    Raises:
        RankError: It failed on some ranks; raised on all.
        Exception: It failed on all ranks alike: this rank's own exception.
    """
    return _at(what).every(work)


def each(what: str, work: Callable[[], T]) -> T:
    """Run something on every rank, each of which keeps what it got itself; as :func:`together`."""
    return _at(what).each(work)


def slowest(what: str, seconds: Callable[[], Sequence[float]]) -> list[float]:
    """Take times on all ranks at once; each as the slowest rank had it. As :func:`together`.

    All ranks begin when the last is ready, if they come here straight from another exchange.
    """
    return [max(times) for times in zip(*together(what, seconds), strict=True)]


def worst(what: str, work: Callable[[], T], weight: Callable[[T], Any]) -> T:
    """Run something on every rank and go on with the result of most weight, the lowest rank's of equals; as :func:`together`."""
    return max(together(what, work), key=weight)


def same(what: str, value: T) -> T:
    """Rank 0's value on every rank; collective."""
    ranks = _at(what)
    sent: list[Any] = ranks.gather(value if ranks.rank == 0 else None)
    return sent[0]  # type: ignore[no-any-return]


def now() -> float:
    """Seconds of ``time.monotonic``, of rank 0's clock on every rank; collective."""
    return same("the clock", time.monotonic())


def alike(call: str, **values: object) -> None:
    """Refuse to go on where ranks differ in values, given by name; collective.

    Raises:
        StateError: On every rank, naming who has what.
    """
    heard = together(f"what {call} compares", lambda: values)
    for name, value in heard[0].items():
        if any(other[name] != value for other in heard):
            held = ", ".join(f"{other[name]} on rank {at}" for at, other in enumerate(heard))
            raise StateError(f"{call}: {name} differs between ranks: {held}; {_CURE}")
