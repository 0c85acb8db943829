"""Let the ranks of a process group measure together and agree on values.

In a search, no other code exchanges values between ranks.

Every rank runs the same code. Values that can differ between ranks (a time, a clock, the result of a pass, whether it failed) go
through a :class:`Lockstep`, so that all ranks continue with the same numbers and make the same decisions. With one process nothing
is exchanged, and each method returns this process's value.

There is only one kind of exchange, so ranks cannot wait for each other in different collectives. Each rank sends its value and the
name of the exchange, and receives the values and names of all other ranks. Exchanges use a separate gloo group on the CPU, whatever
the backend of the default group. So they need no memory of the measured device, and do not mix with the collectives of a user's
loss. A rank that leaves early writes the reason into the group's store and closes its connections. The other ranks notice that the
connections are closed, and read the reason.
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
    """Raised when another rank has left.

    It is not an ``Exception``, so that no rank mistakes it for a failure of a measured plan and continues alone.
    """


class Lockstep(Ranks):
    """All ranks of the default process group, which exchange values over a group of their own.

    Args:
        call: The caller, for errors; None for this process alone, without a group.

    Raises:
        StateError: Another rank did not join.
    """

    def __init__(self, call: str | None = None) -> None:
        try:
            super().__init__(ALONE if call is None else dist.new_group(backend="gloo"))
            if call is not None:  # otherwise a rank that raises early could end before the others have joined
                dist.barrier(self.group)
        except RuntimeError as error:
            raise StateError(
                f"{call}: not all {dist.get_world_size()} ranks made this call ({first_line(error)}); make it on every rank of the "
                "process group, or before init_process_group"
            ) from error
        self._exchange = ""

    def at(self, name: str) -> Self:
        """Return a copy of this object that names its next exchange of values between ranks.

        All ranks must use the same name for the same exchange, so that an error tells where ranks run different steps.
        """
        other = copy.copy(self)
        other._exchange = name
        return other

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks; values are pickled."""
        try:
            heard = super().gather((self._exchange, value))
        except RuntimeError as error:
            raise self._absence(error) from None
        exchanges = [name for name, _ in heard]
        if len(set(exchanges)) > 1:
            where = ", ".join(f"rank {at} at {name}" for at, name in enumerate(exchanges))
            raise _Gone(f"the ranks do not run the same steps: {where}; {_CURE}")
        return [sent for _, sent in heard]

    def slowest(self, seconds: Callable[[], Sequence[float]]) -> list[float]:
        """Take times on all ranks at once, and return for each time the value of the slowest rank.

        All ranks start when the last rank is ready, if they come here directly from another exchange.
        """
        return [max(times) for times in zip(*self.every(seconds), strict=True)]

    def worst(self, work: Callable[[], T], weight: Callable[[T], Any]) -> T:
        """Run ``work`` on every rank and return the result with the largest weight; ties go to the lowest rank."""
        return max(self.every(work), key=weight)

    def same(self, value: T) -> T:
        """Return the value of rank 0 on every rank."""
        sent: list[Any] = self.gather(value if self.rank == 0 else None)
        return sent[0]  # type: ignore[no-any-return]

    def now(self) -> float:
        """Return the seconds of ``time.monotonic`` on rank 0."""
        return self.at("the clock").same(time.monotonic())

    def alike(self, call: str, **values: object) -> None:
        """Raise an error if a value, given by its name, is not equal on all ranks.

        Raises:
            StateError: A value differs; the error is raised on every rank, and lists the value of each rank.
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
        """Return the exception to raise when a rank is missing, with the reason that the rank left in the group's store."""
        try:
            store = self.group.get_group_store()
            for at in range(self.size):
                if store.check([f"left/{at}"]):
                    said = json.loads(store.get(f"left/{at}"))
                    if said["interrupted"]:
                        return KeyboardInterrupt(f"rank {at} was interrupted")
                    return _Gone(f"rank {at} failed: {said['words']}")
        except RuntimeError:  # the store ended with the rank that hosted it
            pass
        return _Gone(f"another rank ended without an error ({first_line(error)})")

    def leave(self, error: BaseException) -> None:
        """Write the reason why this rank leaves early into the group's store, for the other ranks."""
        said = {
            "interrupted": isinstance(error, KeyboardInterrupt),
            "words": f"{type(error).__name__}: {first_line(error)}",
        }
        with contextlib.suppress(RuntimeError):
            self.group.get_group_store().set(f"left/{self.rank}", json.dumps(said))

    def close(self) -> None:
        """Close the connections, which wakes ranks that wait for this one."""
        dist.destroy_process_group(self.group)
        self.group = None  # a failed search may keep this object alive


BY_ITSELF = Lockstep()
"""A :class:`Lockstep` of this process alone, regardless of its process groups."""


@contextlib.contextmanager
def lockstep(call: str) -> Iterator[Lockstep]:
    """Yield a :class:`Lockstep`, by which all ranks of the process group agree on values inside the block.

    All ranks must enter the block. Without torch.distributed, or with one process, the object stands for this process alone.

    Raises:
        StateError: Another rank has left, or did not join.
        KeyboardInterrupt: Another rank was interrupted.
    """
    if not running() or dist.get_world_size() == 1:
        yield BY_ITSELF
        return
    ranks = Lockstep(call)
    try:
        yield ranks
        ranks.at("the end").gather(None)  # no rank closes while another still exchanges
    except _Gone as gone:
        raise StateError(f"{call}: {gone}") from None
    except BaseException as error:
        ranks.leave(error)
        raise
    finally:
        ranks.close()
