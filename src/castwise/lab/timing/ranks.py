"""Ranks that measure together: the one place where the ranks of a search come to agree.

Every rank runs the same code. What can differ between them (a time, a clock, what a pass gave, whether it failed) goes
through a :class:`Lockstep`, so that all go on with the same numbers and take the same decisions. With one process nothing
is exchanged and each method hands back what this process has.

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
from typing import Any, Self, TypeVar

import torch.distributed as dist

from castwise.core.ranks.group import ALONE, Ranks, first_line, running
from castwise.errors import StateError
from castwise.lab.timing.failures import cannot_run, unfit

T = TypeVar("T")
_CURE = "give every rank the same model, batches and arguments"


class _Gone(BaseException):
    """Another rank has left. No ``Exception``: no rank may take it for the failure of a candidate and go on alone."""


class Lockstep(Ranks):
    """All ranks, in a group of their own; without a caller this process alone.

    Args:
        call: The caller, for errors.

    Raises:
        StateError: Another rank never came.
    """

    def __init__(self, call: str | None = None) -> None:
        try:
            super().__init__(ALONE if call is None else dist.new_group(backend="gloo"))
            if call is not None:  # one that refuses at once would end before the others have met it
                dist.barrier(self.group)
        except RuntimeError as error:
            raise StateError(
                f"{call}: not all {dist.get_world_size()} ranks came ({first_line(error)}); call it on every rank of the process "
                "group, or before init_process_group"
            ) from error
        self._exchange = ""

    def at(self, name: str) -> Self:
        """The same ranks for one exchange, whose name has to be the same on all."""
        other = copy.copy(self)
        other._exchange = name
        return other

    def gather(self, value: T) -> list[T]:
        """What each of them gives, by rank; it is pickled."""
        try:
            heard = super().gather((self._exchange, value))
        except RuntimeError as error:
            raise self._absence(error) from None
        exchanges = [name for name, _ in heard]
        if len(set(exchanges)) > 1:
            where = ", ".join(f"rank {at} at {name}" for at, name in enumerate(exchanges))
            raise _Gone(f"the ranks went separate ways: {where}; {_CURE}")
        return [sent for _, sent in heard]

    def slowest(self, seconds: Callable[[], Sequence[float]]) -> list[float]:
        """Take times on all ranks at once; each as the slowest rank had it.

        All ranks begin when the last is ready, if they come here straight from another exchange.
        """
        return [max(times) for times in zip(*self.every(seconds), strict=True)]

    def worst(self, work: Callable[[], T], weight: Callable[[T], Any]) -> T:
        """Run something on every rank and go on with the result of most weight, the lowest rank's of equals."""
        return max(self.every(work), key=weight)

    def same(self, value: T) -> T:
        """Rank 0's value on every rank."""
        sent: list[Any] = self.gather(value if self.rank == 0 else None)
        return sent[0]  # type: ignore[no-any-return]

    def now(self) -> float:
        """Seconds of ``time.monotonic``, of rank 0's clock on every rank."""
        return self.at("the clock").same(time.monotonic())

    def alike(self, call: str, **values: object) -> None:
        """Refuse to go on where ranks differ in values, given by name.

        Raises:
            StateError: On every rank, naming who has what.
        """
        heard = self.at(f"what {call} compares").every(lambda: values)
        for name, value in heard[0].items():
            if any(other[name] != value for other in heard):
                held = ", ".join(f"{other[name]} on rank {at}" for at, other in enumerate(heard))
                raise StateError(f"{call}: {name} differs between ranks: {held}; {_CURE}")

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
        return _Gone(f"another rank ended without an error ({first_line(error)})")

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
        self.group = None  # a search that has failed may outlive this, and its ranks with it


BY_ITSELF = Lockstep()
"""This process alone, whatever groups it is in."""


@contextlib.contextmanager
def lockstep(call: str) -> Iterator[Lockstep]:
    """The ranks of the process group, to agree on what is done inside; collective.

    They are this process alone without torch.distributed, or with one process.

    Raises:
        StateError: Another rank has left, or never came.
        KeyboardInterrupt: Another rank was interrupted.
    """
    if not running() or dist.get_world_size() == 1:
        yield BY_ITSELF
        return
    ranks = Lockstep(call)
    try:
        yield ranks
        ranks.at("the end").gather(None)  # nobody closes while another still asks
    except _Gone as gone:
        raise StateError(f"{call}: {gone}") from None
    except BaseException as error:
        ranks.leave(error)
        raise
    finally:
        ranks.close()
