"""What several ranks decide together: either all go on, or all raise the same error."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from castwise.errors import CheckpointError

__all__ = ["Ranks"]

_T = TypeVar("_T")
_apart: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Groups of this room's own, by the group whose ranks they hold."""


class Ranks:
    """The ranks of a process group; without torch.distributed, this process alone.

    Every method but the constructor is called by all ranks, in the same order.

    Args:
        group: A process group; None for all ranks.

    Raises:
        CheckpointError: This process is not in the group.
    """

    def __init__(self, group: Any = None) -> None:
        running = dist.is_available() and dist.is_initialized()
        self.group = group if running else None
        self.rank: int = dist.get_rank(group) if running else 0
        self.size: int = dist.get_world_size(group) if running else 1
        if self.rank < 0:
            raise CheckpointError(
                "process_group: this rank is not in it; only the group's own ranks save and load"
            )

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to agree with."""
        return self.size == 1

    def apart(self) -> Ranks:
        """The same ranks in a gloo group of its own, whose collectives may run in a background thread.

        The group is made once and then kept as long as the one that it copies.
        """
        if self.alone:
            return self
        key = self.group if self.group is not None else dist.group.WORLD
        if key not in _apart:
            members = dist.get_process_group_ranks(key)
            _apart[key] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        return Ranks(_apart[key])

    def every(self, task: Callable[[], _T]) -> list[_T]:
        """What a task returns on each rank.

        Raises:
            CheckpointError: It failed on some; all of them are named.
        """
        value, error = _attempt(task)
        text = None if error is None else _say(error)
        outcomes: list[Any] = [(value, text)]
        if not self.alone:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, (value, text), group=self.group)
        failures: dict[str, list[int]] = {}
        for rank, (_, said) in enumerate(outcomes):
            if said is not None:
                failures.setdefault(said, []).append(rank)
        if failures:
            raise CheckpointError(self._join(failures)) from error
        return [outcome for outcome, _ in outcomes]

    def agree(self, task: Callable[[], _T]) -> _T:
        """Run a task on each rank, and return what it returned on this one.

        Raises:
            CheckpointError: It failed on some; all of them are named.
        """
        kept: list[_T] = []
        self.every(lambda: kept.append(task()))
        return kept[0]

    def first(self, task: Callable[[], _T]) -> _T:
        """Run a task on the first rank alone, and return on all what it returned there.

        Raises:
            CheckpointError: It failed.
        """
        value, error = _attempt(task) if self.rank == 0 else (None, None)
        outcome: list[Any] = [(value, None if error is None else _say(error))]
        if not self.alone:
            dist.broadcast_object_list(outcome, src=self._source(), group=self.group)
        value, text = outcome[0]
        if text is not None:
            raise CheckpointError(text) from error
        return value  # type: ignore[no-any-return]

    def to_first(self, value: _T) -> list[_T]:
        """The values of all ranks, on the first; an empty list on the others."""
        if self.alone:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, gathered, dst=self._source(), group=self.group)
        return gathered or []

    def _source(self) -> int:
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)

    def _join(self, failures: dict[str, list[int]]) -> str:
        if len(failures) == 1 and sum(map(len, failures.values())) == self.size:
            return next(iter(failures))
        return "; ".join(
            f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in list(failures.items())[:5]
        )


def _attempt(task: Callable[[], _T]) -> tuple[_T | Any, BaseException | None]:
    try:
        return task(), None
    except (Exception, CheckpointException) as error:  # whatever it is, the other ranks wait for word of it
        return None, error


def _say(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, CheckpointException):  # DCP's, with a stack of every rank
        return "; ".join(f"rank {rank}: {_say(cause)}" for rank, (cause, _) in error.failures.items())
    return f"{type(error).__name__}: {error}"
