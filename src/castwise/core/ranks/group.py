"""Groups of processes that act together, and actions that all of them complete or none does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch.distributed as dist

from castwise.core.ranks.text import named
from castwise.core.ranks.waiting import Waiting
from castwise.errors import CastwiseError, RankError, StateError, place

_T = TypeVar("_T")
_groups: weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], Any]] = weakref.WeakKeyDictionary()
"""Groups by use and member ranks, for each default process group."""


class _Alone:
    def __repr__(self) -> str:
        return "castwise.ranks.ALONE"


ALONE: Final = _Alone()
"""Placeholder for a process group: this process alone, whatever groups it belongs to."""


def running() -> bool:
    """Whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


class Ranks:
    """The processes of a group; without torch.distributed, this process alone.

    All of the processes call each method, in the same order.

    Args:
        group: A process group, :data:`ALONE`, or None for all ranks.
        error: The exception type that all ranks raise if one fails. Without it each raises its own exception if all failed
            alike, and a :class:`~castwise.errors.RankError` otherwise.

    Attributes:
        size: Number of processes.
        rank: Index of this process among them.

    Raises:
        StateError: This process is not in the group; or the type given as ``error``.
    """

    def __init__(self, group: Any = None, error: type[CastwiseError] | None = None) -> None:
        self.group, self._error = group, error
        together = group is not ALONE and running()
        self.size: int = dist.get_world_size(group) if together else 1
        self.rank: int = dist.get_rank(group) if together else 0
        if self.rank < 0:
            raise (error or StateError)(
                f"process group: this rank (global rank {dist.get_rank()}) is not in it; give each rank a group that it belongs to, or "
                "none for all ranks"
            )

    def gather(self, value: _T) -> list[_T]:
        """Gather a picklable object from each process, by rank."""
        if self.size == 1:
            return [value]
        heard: list[Any] = [None] * self.size
        dist.all_gather_object(heard, value, group=self.group)
        return heard

    def meet(self, value: _T) -> list[_T]:
        """:meth:`gather` at a point that all ranks reach together; a rank that waits for seconds names the missing ranks."""
        if self.size == 1:
            return [value]
        with Waiting(self.group):
            return self.gather(value)

    def to_first(self, value: _T) -> list[_T]:
        """Gather objects on the first rank, by rank; an empty list on the others."""
        if self.size == 1:
            return [value]
        heard: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, heard, group=self.group, group_dst=0)
        return heard or []

    def every(self, task: Callable[[], _T]) -> list[_T]:
        """Run a task on all ranks; returns all results, by rank.

        Raises:
            RankError: The task failed on some ranks, which it names; raised on all. Or the type given as ``error``.
            Exception: The task failed alike on all: this rank's own exception.
        """
        if self.size == 1 and self._error is None:
            return [task()]
        value, failure = _attempt(task)
        said = (
            None
            if failure is None
            else ((self._say(failure), self._reason(failure)), self._cannot_run(failure))
        )
        heard = self.gather((value, said))
        failed = {at: said for at, (_, said) in enumerate(heard) if said is not None}
        if not failed:
            return [got for got, _ in heard]  # type: ignore[misc]
        texts, reasons = ({at: said[0][part] for at, said in failed.items()} for part in (0, 1))
        alike = len(failed) == len(heard) and len(set(reasons.values())) == 1
        if self._error is not None:
            raise self._error(texts[0] if alike else _by_rank(texts)) from failure
        if alike and failure is not None:
            raise failure
        raise RankError(
            _by_rank(texts),
            reason=_by_rank(reasons),
            cannot_run=all(lacking for _, lacking in failed.values()),
        ) from failure

    def each(self, task: Callable[[], _T]) -> _T:
        """Run a task on all ranks; each keeps its own result.

        Raises:
            Exception: As :meth:`every`.
        """
        kept: list[_T] = []
        self.every(lambda: kept.append(task()))
        return kept[0]

    def first(self, task: Callable[[], _T]) -> _T:
        """Run a task on the first rank only; returns its result on all.

        Raises:
            RankError: The task failed. Or the type given as ``error``; with a single process and no ``error``, its own
                exception.
        """
        if self.size == 1 and self._error is None:
            return task()
        value, failure = _attempt(task) if self.rank == 0 else (None, None)
        outcome: list[Any] = [(value, None if failure is None else self._say(failure))]
        if self.size > 1:
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        value, said = outcome[0]
        if said is not None:
            raise (self._error or RankError)(said) from failure
        return value  # type: ignore[no-any-return]

    def duplicate(self, use: str) -> Ranks:
        """The same ranks in a separate gloo group, created once for each use.

        A separate group keeps collectives of one use from mixing with those of another on a different thread.
        """
        if self.size == 1:
            return self
        group = self.group if self.group is not None else dist.group.WORLD
        return Ranks(_group(use, dist.get_process_group_ranks(group)), self._error)

    @classmethod
    def among(cls, members: Sequence[int], use: str) -> Ranks:
        """A group of some ranks, by global number, created like :meth:`duplicate`."""
        return cls(ALONE if len(members) == 1 else _group(use, members))

    def some(self, places: Sequence[int], use: str) -> Ranks:
        """A group of some of these ranks, by number in this group, with the same backend, created once for each use.

        All ranks of this group call it. Ranks outside the subset get a group of their own: torch names a group by the number of
        groups that a process has, so ranks with fewer could create no further one together (seen in torch 2.13).
        """
        group: Any = self.group if self.group is not None else dist.group.WORLD
        members = [dist.get_global_rank(group, place) for place in places]
        if len(members) == 1:
            return Ranks(ALONE)
        mine = members if self.rank in places else [dist.get_rank()]
        return Ranks(_group(f"{use} {members}", mine, dist.get_backend(group)))

    def merge(self, value: _T, join: Callable[[list[_T]], _T]) -> _T:
        """Merge objects of all ranks with ``join`` on the first rank; the same result on all."""
        if self.size == 1:
            return value
        given = self.to_first(value)
        return self.first(lambda: join(given))

    def _say(self, failure: Exception) -> str:
        """An error in the form in which the other ranks receive it."""
        if self._error is None:
            where = place(failure)
            return f"{type(failure).__name__}: {first_line(failure)}" + (f" ({where})" if where else "")
        return str(failure) if isinstance(failure, self._error) else f"{type(failure).__name__}: {failure}"

    def _reason(self, failure: Exception) -> str:
        """The reason of an error as a clause; ranks with equal reasons failed alike."""
        return self._say(failure)

    def _cannot_run(self, failure: Exception) -> bool:
        """Whether an error means that a plan cannot run here; see :attr:`RankError.cannot_run`."""
        return False


def _group(use: str, members: Sequence[int], backend: str = "gloo") -> Any:
    known, key = _groups.setdefault(dist.group.WORLD, {}), (use, tuple(sorted(members)))
    if key not in known:
        known[key] = dist.new_group([*key[1]], backend=backend, use_local_synchronization=True)
    return known[key]


def _attempt(task: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return task(), None
    except Exception as failure:  # the other ranks must receive it first
        return None, failure


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _by_rank(texts: Mapping[int, str]) -> str:
    """``on rank 1: why; on ranks 2, 3: another``, for at most five ranks."""
    ranks_of: dict[str, list[int]] = {}
    for at, text in texts.items():
        ranks_of.setdefault(text, []).append(at)
    return "; ".join(f"on {named(ranks)}: {text}" for text, ranks in list(ranks_of.items())[:5])
