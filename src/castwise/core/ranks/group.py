"""Run actions on a group of processes, so that either all of them complete the action or all raise."""

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
"""The groups that :func:`_group` created, by use and member ranks, for each default process group."""


class _Alone:
    def __repr__(self) -> str:
        return "castwise.ranks.ALONE"


ALONE: Final = _Alone()
"""A value to give in place of a process group, which stands for this process alone, whatever groups it belongs to."""


_AVAILABLE: Final = dist.is_available()


def default_group() -> Any:
    """Return the default process group of torch.distributed, or None if there is none."""
    return dist.group.WORLD if _AVAILABLE else None


def running() -> bool:
    """Whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


class Ranks:
    """The processes of a group, or this process alone if torch.distributed is not initialised.

    All of these processes must call each method, in the same order.

    Args:
        group: A process group, :data:`ALONE`, or None for all ranks.
        error: The exception type that all ranks raise if one rank fails. Without it, each rank raises its own exception
            if all ranks failed for the same reason, and a :class:`~castwise.errors.RankError` otherwise.

    Attributes:
        size: Number of processes.
        rank: Index of this process among them.

    Raises:
        StateError: This process is not in the group. If ``error`` is given, that type is raised instead.
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
        """Gather an object from each process, and return all objects in the order of ranks. They must be picklable."""
        if self.size == 1:
            return [value]
        heard: list[Any] = [None] * self.size
        dist.all_gather_object(heard, value, group=self.group)
        return heard

    def meet(self, value: _T) -> list[_T]:
        """Gather an object from each process as :meth:`gather` does, at a point that all ranks should reach together.

        A rank that has to wait for several seconds warns and names the missing ranks.
        """
        if self.size == 1:
            return [value]
        with Waiting(self.group):
            return self.gather(value)

    def to_first(self, value: _T) -> list[_T]:
        """Gather an object from each process on the first rank.

        Returns:
            The objects in the order of ranks on the first rank, and ``[]`` on all other ranks.
        """
        if self.size == 1:
            return [value]
        heard: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, heard, group=self.group, group_dst=0)
        return heard or []

    def every(self, task: Callable[[], _T]) -> list[_T]:
        """Run a task on all ranks and return the results of all ranks, in the order of ranks.

        Raises:
            RankError: The task failed on some ranks. All ranks raise this, and the message names the ranks that failed.
                If ``error`` was given to the class, that type is raised instead.
            Exception: The task failed on all ranks for the same reason. Each rank then raises its own exception.
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
        """Run a task on all ranks and return this rank's own result.

        Raises:
            Exception: The task failed on some rank, see :meth:`every`.
        """
        kept: list[_T] = []
        self.every(lambda: kept.append(task()))
        return kept[0]

    def first(self, task: Callable[[], _T]) -> _T:
        """Run a task on the first rank only and return its result on all ranks.

        Raises:
            RankError: The task failed. If ``error`` was given to the class, that type is raised instead. A single
                process without ``error`` raises the task's own exception.
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
        """Return the same ranks with a gloo group of their own, which is created once for each ``use``.

        With a separate group, collectives of one use cannot mix with those of another use on a different thread.
        """
        if self.size == 1:
            return self
        group = self.group if self.group is not None else dist.group.WORLD
        return Ranks(_group(use, dist.get_process_group_ranks(group)), self._error)

    @classmethod
    def among(cls, members: Sequence[int], use: str) -> Ranks:
        """Return the ranks with these global numbers, with a gloo group that is created once for each ``use``."""
        return cls(ALONE if len(members) == 1 else _group(use, members))

    def some(self, places: Sequence[int], use: str) -> Ranks:
        """Return a subset of these ranks, with a group of the same backend that is created once for each ``use``.

        ``places`` are the numbers of the ranks in this group. All ranks of this group must call this. A rank outside
        the subset gets a group that contains only itself. This is needed because torch names a group by the number of
        groups that a process has: ranks that have fewer groups could not create another group with the rest (seen in
        torch 2.13).
        """
        group: Any = self.group if self.group is not None else dist.group.WORLD
        members = [dist.get_global_rank(group, place) for place in places]
        if len(members) == 1:
            return Ranks(ALONE)
        mine = members if self.rank in places else [dist.get_rank()]
        return Ranks(_group(f"{use} {members}", mine, dist.get_backend(group)))

    def merge(self, value: _T, join: Callable[[list[_T]], _T]) -> _T:
        """Apply ``join`` to the objects of all ranks, on the first rank, and return the result on all ranks."""
        if self.size == 1:
            return value
        given = self.to_first(value)
        return self.first(lambda: join(given))

    def _say(self, failure: Exception) -> str:
        """Return the text that other ranks receive about an error of this rank."""
        if self._error is None:
            where = place(failure)
            return f"{type(failure).__name__}: {first_line(failure)}" + (f" ({where})" if where else "")
        return str(failure) if isinstance(failure, self._error) else f"{type(failure).__name__}: {failure}"

    def _reason(self, failure: Exception) -> str:
        """Return the reason of an error as a clause; ranks whose reasons are equal failed for the same reason."""
        return self._say(failure)

    def _cannot_run(self, failure: Exception) -> bool:
        """Whether an error means that a plan cannot run on this rank; see :attr:`RankError.cannot_run`."""
        return False


def _group(use: str, members: Sequence[int], backend: str = "gloo") -> Any:
    known, key = _groups.setdefault(dist.group.WORLD, {}), (use, tuple(sorted(members)))
    if key not in known:
        known[key] = dist.new_group([*key[1]], backend=backend, use_local_synchronization=True)
    return known[key]


def _attempt(task: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return task(), None
    except (
        Exception
    ) as failure:  # returned, since the other ranks must learn of it before this rank raises it
        return None, failure


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _by_rank(texts: Mapping[int, str]) -> str:
    """Return texts and the ranks they come from, as ``on rank 1: why; on ranks 2, 3: another``, at most five texts."""
    ranks_of: dict[str, list[int]] = {}
    for at, text in texts.items():
        ranks_of.setdefault(text, []).append(at)
    return "; ".join(f"on {named(ranks)}: {text}" for text, ranks in list(ranks_of.items())[:5])
