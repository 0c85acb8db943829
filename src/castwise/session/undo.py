"""The undo log: what was changed, and how it is taken back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["UndoLog"]


class UndoLog:
    """Entries that each undo one change, replayed from the last to the first.

    Unlike ``contextlib.ExitStack`` it does an entry again that an interrupt stopped half way, before those that count on it,
    and raises the interrupt at the end. Where another one comes there, the rest is left to the next :meth:`close`. So an
    entry must allow for being done twice.
    """

    def __init__(self) -> None:
        self._entries: list[Callable[[], object]] = []

    def callback(self, function: Callable[..., object], /, *args: Any) -> None:
        """Have ``function(*args)`` called when the log is replayed."""
        self._entries.append(functools.partial(function, *args))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[UndoLog]:
        """Undo what was entered inside, if the block fails."""
        mark = len(self._entries)
        try:
            yield self
        except BaseException as error:
            try:
                self._replay(mark)
            except BaseException as other:
                error.add_note(f"Taking back what had been changed failed as well: {other!r}")
            raise

    def close(self) -> None:
        """Undo everything. An entry that fails does not keep the others from being undone; the first error is raised."""
        self._replay(0)

    def _replay(self, mark: int) -> None:
        failed: BaseException | None = None
        interrupted: Callable[[], object] | None = None
        while len(self._entries) > mark:
            entry = self._entries[-1]
            try:
                entry()
            except Exception as error:
                failed = failed or error
            except BaseException as error:
                if interrupted is entry:
                    raise
                failed = error if failed is None or isinstance(failed, Exception) else failed
                interrupted = entry
                continue
            self._entries.pop()
        if failed is not None:
            raise failed
