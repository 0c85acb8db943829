"""The undo log: the changes that were made, each with a function that undoes it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch


class UndoLog:
    """Entries that each undo one change, applied from the last to the first.

    Unlike ``contextlib.ExitStack``, it repeats an entry that an interrupt stopped half way, before the entries that
    depend on it, and raises the interrupt at the end. After a second interrupt, the rest is left to the next
    :meth:`close`. So an entry must tolerate being run twice. Grad mode is restored: an interrupt inside torch's
    ``no_grad`` can leave it off.

    Attributes:
        kept: Objects that entries need for an exact undo of a failed transaction, and that would only take memory
            later: released when a transaction succeeds.
    """

    def __init__(self) -> None:
        self._entries: list[Callable[[], object]] = []
        self.kept: list[Any] = []

    def callback(self, function: Callable[..., object], /, *args: Any) -> None:
        """Call ``function(*args)`` when the log is applied."""
        self._entries.append(functools.partial(function, *args))

    def on(self, target: object, function: Callable[..., object], /, *args: Any) -> None:
        """Call ``function(target, *args)`` when the log is applied, if ``target`` still exists: it is held weakly."""
        self._entries.append(functools.partial(_on, weakref.ref(target), function, args))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[UndoLog]:
        """Undo the entries made in the block if the block fails."""
        mark, grad = len(self._entries), torch.is_grad_enabled()
        try:
            yield self
            self.kept.clear()
        except BaseException as error:
            torch.set_grad_enabled(grad)
            try:
                self._undo(mark)
            except BaseException as other:
                error.add_note(f"Undoing the changes failed as well: {other!r}")
            raise

    def close(self) -> None:
        """Undo everything. If an entry fails, the others are still undone; the first error is raised."""
        self._undo(0)

    def _undo(self, mark: int) -> None:
        failed: BaseException | None = None
        entry: Callable[[], object] | None = None
        interrupted: Callable[[], object] | None = None
        grad = torch.is_grad_enabled()
        while len(self._entries) > mark:
            try:
                entry = self._entries[-1]
                entry()
                self._entries.pop()
            except Exception as error:
                failed = failed or error
                torch.set_grad_enabled(grad)
                self._entries.pop()
            except BaseException as error:
                torch.set_grad_enabled(grad)
                if interrupted is entry:
                    raise
                failed = error if failed is None or isinstance(failed, Exception) else failed
                interrupted = entry
        self.kept.clear()
        if failed is not None:
            raise failed


def _on(reference: weakref.ref[object], function: Callable[..., object], args: tuple[Any, ...]) -> None:
    target = reference()
    if target is not None:
        function(target, *args)
