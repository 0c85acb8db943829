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
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from castwise.errors import RankError, StateError
from castwise.measure.failures import cannot_run, first_line, unfit
from castwise.parallel.agreement import apart

__all__ = ["alike", "count", "each", "lockstep", "now", "rank", "same", "slowest", "together", "worst"]

T = TypeVar("T")


class _Gone(BaseException):
    """Another rank has left. No ``Exception``: nobody may take it for the failure of a candidate and go on alone."""


class _Meeting:
    def __init__(self, call: str) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        try:
            self._group: Any = dist.new_group(backend="gloo")
        except RuntimeError as error:
            raise StateError(
                f"{call}: not all {self.count} ranks came ({first_line(error)}); call it on every rank of the process group, "
                "or before init_process_group"
            ) from error

    def exchange(self, what: str, value: Any) -> list[Any]:
        """What every rank sent, by rank."""
        heard: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(heard, (what, value), group=self._group)
        except RuntimeError as error:
            raise self._absence(error) from None
        places = [place for place, _ in heard]
        if len(set(places)) > 1:
            where = ", ".join(f"rank {at} at {place}" for at, place in enumerate(places))
            raise _Gone(
                f"the ranks went separate ways: {where}; give every rank the same model, batches and arguments"
            )
        return [sent for _, sent in heard]

    def _absence(self, error: RuntimeError) -> BaseException:
        """Why ranks are missing, as they said themselves."""
        try:
            store = self._group.get_group_store()
            for at in range(self.count):
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
            self._group.get_group_store().set(f"left/{self.rank}", json.dumps(said))

    def close(self) -> None:
        """Let go of the connections, which wakes whoever waits for this rank."""
        dist.destroy_process_group(self._group)
        self._group = None


_meeting: _Meeting | None = None


@contextlib.contextmanager
def lockstep(call: str) -> Iterator[None]:
    """Make the ranks of the process group agree on all that this module is asked inside; collective.

    Nothing happens without torch.distributed, with one process, or inside of another ``lockstep``.

    Args:
        call: The caller, for errors.

    Raises:
        StateError: Another rank has left, or never came.
        KeyboardInterrupt: Another rank was interrupted.
    """
    global _meeting
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if _meeting is not None or not several:
        yield
        return
    meeting = _meeting = _Meeting(call)
    try:
        with apart():  # what is tried must not ask other ranks, which may fail at another place
            yield
        meeting.exchange("the end", None)  # nobody closes while another still asks
    except _Gone as gone:
        raise StateError(f"{call}: {gone}") from None
    except BaseException as error:
        meeting.leave(error)
        raise
    finally:
        _meeting = None
        meeting.close()


def count() -> int:
    """How many ranks measure together; 1 outside of :func:`lockstep`."""
    return 1 if _meeting is None else _meeting.count


def rank() -> int:
    """Which of them this process is; 0 outside of :func:`lockstep`."""
    return 0 if _meeting is None else _meeting.rank


def together(what: str, work: Callable[[], T]) -> list[T]:
    """Run something on every rank and wait for all; collective.

    Args:
        what: What it is, the same on all ranks; for errors.
        work: What to run. What it returns is pickled.

    Returns:
        What it returned, by rank.

    Raises:
        RankError: It failed on some ranks; raised on all.
        Exception: It failed on all ranks alike: this rank's own exception.
    """
    if _meeting is None:
        return [work()]
    value: T | None = None
    failure: Exception | None = None
    try:
        value = work()
    except Exception as error:  # the other ranks have to hear of it first
        failure = error
    said = None
    if failure is not None:
        said = (unfit(failure), f"{type(failure).__name__}: {first_line(failure)}", cannot_run(failure))
    heard = _meeting.exchange(what, (value, said))
    failed = {at: words for at, (_, words) in enumerate(heard) if words is not None}
    if not failed:
        return [got for got, _ in heard]
    if failure is not None and len(failed) == len(heard) and len({why for why, *_ in failed.values()}) == 1:
        raise failure
    reasons, texts, lacking = zip(*failed.values(), strict=True)
    raise RankError(
        _by_rank(failed, texts), reason=_by_rank(failed, reasons), cannot_run=all(lacking)
    ) from failure


def each(what: str, work: Callable[[], T]) -> T:
    """Run something on every rank, each of which keeps what it got itself; collective.

    Raises:
        Exception: As :func:`together`.
    """
    held: list[T] = []
    together(what, lambda: held.append(work()))
    return held[0]


def slowest(what: str, seconds: Callable[[], Sequence[float]]) -> list[float]:
    """Take times on all ranks at once; collective.

    Args:
        what: Names what is timed where a rank fails.
        seconds: Takes the times, as many on every rank. All ranks begin when the last is ready, if they come here
            straight from another exchange.

    Returns:
        Each time as the slowest rank had it.

    Raises:
        Exception: As :func:`together`.
    """
    return [max(times) for times in zip(*together(what, seconds), strict=True)]


def same(what: str, value: T) -> T:
    """Rank 0's value on every rank; collective."""
    if _meeting is None:
        return value
    return _meeting.exchange(what, value if _meeting.rank == 0 else None)[0]  # type: ignore[no-any-return]


def worst(what: str, work: Callable[[], T], weight: Callable[[T], Any]) -> T:
    """Run something on every rank and go on with the worst result; collective.

    Args:
        what: Names the work where a rank fails.
        work: Called once on every rank.
        weight: How bad a result is, in numbers that can be compared; the lowest rank's of those that are equally bad.

    Raises:
        Exception: As :func:`together`.
    """
    return max(together(what, work), key=weight)


def now() -> float:
    """Seconds of ``time.monotonic``, of rank 0's clock on every rank; collective."""
    return same("the clock", time.monotonic())


def alike(call: str, **values: object) -> None:
    """Refuse to go on where ranks differ; collective.

    Args:
        call: The caller, for errors.
        **values: What has to be the same, by name.

    Raises:
        StateError: On every rank, naming who has what.
    """
    heard = together(f"what {call} compares", lambda: values)
    for name, value in heard[0].items():
        if any(other[name] != value for other in heard):
            each = ", ".join(f"{other[name]} on rank {at}" for at, other in enumerate(heard))
            raise StateError(
                f"{call}: {name} differs between ranks: {each}; give every rank the same model, batches and arguments"
            )


def _by_rank(ranks: Sequence[int] | dict[int, Any], texts: Sequence[str]) -> str:
    """``on rank 1: why; on ranks 2, 3: another``."""
    grouped: dict[str, list[str]] = {}
    for at, text in zip(ranks, texts, strict=True):
        grouped.setdefault(text, []).append(str(at))
    return "; ".join(f"on rank{'s' * (len(at) > 1)} {', '.join(at)}: {text}" for text, at in grouped.items())
