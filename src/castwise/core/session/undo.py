"""Record changes, each with a function that undoes it, so that they can be undone later or after a failure."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

_paused: list[bool] = []
"""An entry if the garbage collector was on before :func:`_pause_collector`."""


def _pause_collector() -> None:
    if gc.isenabled():
        _paused.append(
            True
        )  # first, so that the next call of _resume_collector turns it on even after an interrupt
        gc.disable()


def _resume_collector() -> None:
    if _paused:
        gc.enable()
        _paused.clear()


class UndoLog:
    """A list of functions, each of which undoes one change. They are called from the last to the first.

    It differs from ``contextlib.ExitStack`` if an interrupt, such as Ctrl-C, stops a function half way. The function is
    then called again before the rest, and the interrupt is raised at the end. After a second interrupt, the rest is
    left to the next :meth:`close`. So a function must tolerate being called twice. Grad mode is restored, since an
    interrupt inside torch's ``no_grad`` can leave it off.

    Python's garbage collector is paused while changes are made or undone. They create many objects for each parameter,
    of which none is garbage, and would start collections that walk through all objects of the process.

    Attributes:
        kept: Objects that the functions need to undo a failed transaction exactly. They are released when the
            transaction succeeds, since they would only take memory from then on.
    """

    def __init__(self) -> None:
        self._entries: list[Callable[[], object]] = []
        self.kept: list[Any] = []

    def callback(self, function: Callable[..., object], /, *args: Any) -> None:
        """Record that ``function(*args)`` is to be called when changes are undone."""
        self._entries.append(functools.partial(function, *args))

    def on(self, target: object, function: Callable[..., object], /, *args: Any) -> None:
        """Record that ``function(target, *args)`` is to be called when changes are undone, if ``target`` still exists.

        The log holds only a weak reference to ``target``.
        """
        self._entries.append(functools.partial(_on, weakref.ref(target), function, args))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[UndoLog]:
        """Undo the changes that were recorded inside the ``with`` block if the block raises."""
        mark, grad = len(self._entries), torch.is_grad_enabled()
        try:
            _pause_collector()
            yield self
            self.kept.clear()
        except BaseException as error:
            torch.set_grad_enabled(grad)
            try:
                self._undo(mark)
            except BaseException as other:
                error.add_note(f"Undoing the changes failed as well: {other!r}")
            raise
        finally:
            _resume_collector()

    def close(self) -> None:
        """Undo all changes. If undoing one fails, the others are still undone, and the first error is raised at the end."""
        try:
            _pause_collector()
            self._undo(0)
        finally:
            _resume_collector()

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
