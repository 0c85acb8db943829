"""Restore buffers of a model that became non-finite in a step that was skipped.

A forward writes running statistics, codebooks and averages before it is known whether the step will be made. If the
step is skipped because of a non-finite value, each floating buffer that became non-finite since the previous step is
restored. It gets back the whole value that it had at the start of the first forward after the previous step. Every
other buffer stays as the forward left it, as in a hand-written loop. Each buffer is judged separately, since nothing
says which buffers belong together.

The version counters of tensors do not count writes by BatchNorm's kernels, writes through ``.data``, or writes in
compiled code. So values are copied at every step, whether or not they changed. At first all floating buffers are
copied, later the small ones and those that were seen to change. A large buffer that does not change, such as a mask or
a table, is compared with its copy at doubling intervals instead.

In this module, a *window* is the time from one step to the next. A *round* is a period in which each optimizer steps at
most once.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.plans.text import some
from castwise.core.scaler.copies import Copies, Table, empty_again, has_nan, is_kept, values_of
from castwise.core.scaler.result import Restored

_LARGE = 1 << 16
"""The size in bytes above which a buffer is not copied any more once it was seen not to change."""
_UNSEEN = 8
"""The number of rounds without an uncompiled call of the whole model, after which buffers are copied at the end of steps."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_registered = 0
"""How often a module was registered as a child of another module in this process."""


def _note_module(*_: object) -> None:
    global _registered
    _registered += 1


@functools.cache
def _watch_modules() -> None:
    register_module_module_registration_hook(_note_module)


class Buffers:
    """Copies and restores the buffers of all models of one :class:`~castwise.Amp`.

    Attributes:
        number: How many steps have ended.
        rounds: How many rounds have ended. A round ends when an optimizer steps that has already stepped in it. Several
            optimizers may step after one forward, so a round can have several steps.
        backwards: How many losses have been passed to ``backward``.
    """

    def __init__(self) -> None:
        self.number = self.rounds = self.backwards = 0
        self._stepped: tuple[set[int], set[int]] = set(), set()
        """The ``id`` of the optimizers that stepped in the last round, and in this one. See :attr:`rounds`."""
        self._kept: list[weakref.ref[KeptBuffers]] = []
        self._counts: Counter[str] = Counter()
        self._unread: dict[tuple[str, ...], Tensor] = {}
        self.overflows: Mapping[int, object] = {}
        """The overflows after which weights may be written, see :class:`~castwise.core.scaler.written.Written`."""
        self.look_at_weights: Callable[[], object] = int
        """Restores weights that were written from gradients that are not finite."""
        self.before_forward: Callable[[], object] = int
        """A function to call before a forward, which restores buffers if gradients were checked and then not used."""

    def follow(self, model: nn.Module) -> KeptBuffers:
        """Copy and restore the buffers of a model from now on, for as long as the caller keeps the returned object."""
        _watch_modules()
        kept = KeptBuffers(model, self)
        self._kept = [*(one for one in self._kept if one() is not None), weakref.ref(kept)]
        kept.take()
        return kept

    def _alive(self) -> list[KeptBuffers]:
        return [kept for one in self._kept if (kept := one()) is not None]

    def end_window(self, optimizer: Optimizer) -> None:
        """Record that a step of this optimizer has ended, made or skipped, so that the next forward copies buffers again."""
        self.number += 1
        last, now = self._stepped
        if id(optimizer) in now:
            last, now = self._stepped = now, set()
            self.rounds += 1
        now.add(id(optimizer))
        for one in self._kept:
            kept = one()
            if kept is not None and self.rounds - kept.seen > _UNSEEN and now >= last:
                kept.begin_window()

    def put_back(self, flag: Tensor | None = None, of: KeptBuffers | None = None) -> list[Restored]:
        """Restore the buffers that became non-finite since they were copied, if the step was skipped.

        Args:
            flag: A 0-dim fp32 tensor that is above zero if the step was skipped. Buffers are then restored without
                waiting for the device. None if the host knows that the step was skipped.
            of: The model whose buffers are to be restored, or None for all models.

        Returns:
            The names of the restored buffers.
        """
        alive = self._alive()
        found: list[Restored] = []
        for kept in alive if of is None else (of,):
            for names, which in kept.put_back(flag):
                if names:
                    full = names if len(alive) == 1 else tuple(f"{kept.kind}.{name}" for name in names)
                    found.append((full, which))
        for names, which in found:
            if which is None:
                self._counts.update(names)
            else:
                before = self._unread.get(names)
                self._unread[names] = which.int() if before is None else before + which
        return found

    @property
    def restored(self) -> dict[str, int]:
        """How often each buffer was restored, by name, without those that never were.

        Waits for the device if a fused optimizer decided there whether to skip.
        """
        unread, self._unread = self._unread, {}
        for names, counts in unread.items():
            self._counts.update(dict(zip(names, counts.tolist(), strict=True)))
        return {name: count for name, count in self._counts.items() if count}


class KeptBuffers:
    """Holds copies of one model's buffers, with the values they had at the start of the first forward after a step.

    Attributes:
        kind: The name of the model's class.
        seen: The number of the last round (:attr:`Buffers.rounds`) in which the whole model was called outside of
            compiled code.
    """

    def __init__(self, model: nn.Module, session: Buffers) -> None:
        self.kind = type(model).__name__
        self.seen = -_UNSEEN - 1
        self._taken = -1
        self._unused = (-1, -1)
        """The number of steps, and of losses passed to ``backward``, when the last forward in training began."""
        self._unsure = False
        """Whether all forwards since the last step ran without gradients, as when statistics are recomputed."""
        alive = weakref.ref(self)

        def end(_: object) -> None:
            kept = alive()
            if kept is not None:
                kept.forget()

        self._model, self._session = weakref.ref(model, end), session
        self._tables: list[Table] = []
        self._layout = (-1, -1)
        self._groups: list[Copies] = []
        self._empty: list[tuple[Table, str, str]] = []
        """The buffers that are None so far, each with the dict that holds it, its key there, and its name."""
        self._is_bare = False
        """Whether the model has no buffers that must be copied."""
        self._still: dict[str, _Still] = {}
        self._moving: set[str] = set()
        self._told: set[str] = set()
        self._windows = 0

    def forget(self) -> None:
        """Drop all references to the model's buffers, and the copies."""
        self._tables, self._groups, self._empty = [], [], []
        self._still.clear()

    # --- copies ---------------------------------------------------------------------------------------------

    def begin(self, training: bool) -> None:
        """Copy the buffers if the forward that starts now is the first after a step and may write to them.

        To be called at the start of each uncompiled forward of the whole model.
        """
        session = self._session
        if session.overflows:
            session.look_at_weights()
        if self._is_bare and self._layout == (_registered, sum(map(len, self._tables))):
            self.seen = session.rounds
            return
        grad = torch.is_grad_enabled()
        session.before_forward()
        self.forget_unused()
        if training and grad:
            self._unused = session.number, session.backwards
        if self._taken == session.number and not (self._unsure and grad):
            return
        if not (training or grad) or (self._groups and _torch.tensors.is_stand_in_call()):
            return  # this forward writes no buffers, or writes only substituted ones
        if self._taken == session.number:
            _torch.tensors.outside_dispatch_modes(_torch.tensors.without_grad, self._take_sound)
        else:
            self._taken, self.seen = session.number, session.rounds
            self.begin_window()
        self._unsure = not grad

    def forget_unused(self) -> None:
        """Restore buffers after a forward whose loss was not passed to ``backward``, if they hold a new NaN.

        A loop that skips non-finite losses has such forwards. An infinity does not count, since it may be intended, and
        the forward may have been used in another way.
        """
        if self._unused != (self._session.number, self._session.backwards):
            return
        self._unused = (-1, -1)
        found = [
            _torch.tensors.outside_dispatch_modes(_torch.tensors.without_grad, group.has_new_nan)
            for group in self._groups
        ]
        if all(flag.is_cpu for flag in found):
            if any(map(bool, found)):
                self._session.put_back(None, self)
        else:
            home = found[0].device
            self._session.put_back(torch.stack([flag.to(home) for flag in found]).any().float(), self)

    def begin_window(self) -> None:
        """Copy the current values of the buffers, and check from time to time which large buffers change."""
        self._windows += 1
        self.take(look=self._windows > 1 and self._windows & (self._windows - 1) == 0)

    def take(self, *, look: bool = False) -> None:
        """Copy the current values of the buffers, to which they will be restored.

        ``look`` says whether to find out first which large buffers change.
        """
        changed = (
            self._layout != (_registered, sum(map(len, self._tables)))
            or any(table.get(key) is not None for table, key, _ in self._empty)
            or self._stirred()
        )
        if changed or self._groups or look:
            _torch.tensors.outside_dispatch_modes(_torch.tensors.without_grad, self._take, changed, look)

    def _take(self, changed: bool, look: bool) -> None:
        if look and self._look():
            changed = True
        if changed or not all(group.copy() for group in self._groups):
            self._lay_out()
            for group in self._groups:
                group.copy()

    def _take_sound(self) -> None:
        for group in self._groups:
            group.copy_sound()

    def _lay_out(self) -> None:
        """Allocate memory for copies of the buffers that the model has now."""
        model = self._model()
        found = [] if model is None else [*_torch.hooks.buffer_tables(model)]
        self._tables = [table for _, table in found]
        self._layout = _registered, sum(map(len, self._tables))
        groups: dict[Any, Copies] = {}
        self._empty = []
        for path, table in found:
            for key, buffer in table.items():
                name = f"{path}.{key}" if path else key
                if buffer is None:
                    self._empty.append((table, key, name))
                if buffer is None or name in self._still:
                    continue
                if is_kept(buffer):
                    kind = buffer.device, buffer.dtype, buffer.dim() == 1
                    groups.setdefault(kind, Copies()).add(table, key, name)
                elif is_lazy(buffer) or _torch.tensors.is_transformed(buffer):
                    self._layout = (
                        -1,
                        -1,
                    )  # lay out again next time, when another buffer may have replaced this one
        self._groups = [*groups.values()]
        self._is_bare = not (groups or self._empty or self._still or self._layout[0] < 0)
        for group in self._groups:
            group.lay_out()

    # --- large buffers that do not change -----------------------------------------------------------------------

    def _stirred(self) -> bool:
        """Whether a large buffer that had not changed before has been written or replaced, by its version counter."""
        moved = [
            name for name, still in self._still.items() if still.mark != _mark(still.table.get(still.key))
        ]
        for name in moved:
            del self._still[name]
            self._moving.add(name)
        return bool(moved)

    def _look(self) -> bool:
        """Compare large buffers with their last values, and stop copying those that did not change. Waits for the device.

        Returns:
            Whether the set of buffers to copy has changed.
        """
        before = [*self._still]
        for name, still in [*self._still.items()]:
            buffer = still.table[still.key]
            if buffer is None or still.content != _content(buffer):
                del self._still[name]
                self._moving.add(name)
        for group in self._groups:
            for name, table, key, copy in zip(
                group.names, group.tables, group.keys, group.copies, strict=True
            ):
                buffer = table.get(key)
                if (
                    copy.nbytes <= _LARGE
                    or name in self._moving
                    or buffer is None
                    or not group.fits(buffer, copy)
                ):
                    continue
                if torch.equal(values_of(buffer), copy):
                    self._still[name] = _Still(
                        table, key, _mark(buffer), _content(buffer), not has_nan(buffer)
                    )
                else:
                    self._moving.add(name)
        return before != [*self._still]

    # --- putting back -------------------------------------------------------------------------------------------

    def put_back(self, flag: Tensor | None) -> list[Restored]:
        """Restore this model's buffers that became non-finite; see :meth:`Buffers.put_back`."""
        found: list[Restored] = _torch.tensors.outside_dispatch_modes(
            _torch.tensors.without_grad, self._put_back, flag
        )
        return found

    def _put_back(self, flag: Tensor | None) -> list[Restored]:
        found = [one for group in self._groups for one in group.put_back(flag)]
        made = [(table, key, name) for table, key, name in self._empty if table.get(key) is not None]
        if made and (flag is None or bool(flag > 0)):
            found += [((name,), None) for table, key, name in made if empty_again(table, key)]
        if flag is None:
            self._tell()
        return found

    def _tell(self) -> None:
        """Warn of buffers that hold a NaN but have no copy, and of parameters without a gradient that hold a NaN."""
        model = self._model()
        kept = {name for group in self._groups for name in group.names}
        lost = []
        for path, table in () if model is None else _torch.hooks.buffer_tables(model):
            for key, buffer in table.items():
                name = f"{path}.{key}" if path else key
                if name in kept or name in self._told or buffer is None or not is_kept(buffer):
                    continue
                if name in self._still and not self._still[name].sound:
                    continue
                if has_nan(buffer):
                    lost.append(name)
        self._told.update(lost)
        if lost:
            warnings.warn(
                f"A step was skipped because something was not finite, and these buffers of {self.kind} hold a NaN and cannot "
                f"be restored: {some(lost)}. No copy of them exists, because they were created in this window or had "
                f"not changed before. Load them from a checkpoint, or set them again.",
                RuntimeWarning,
                stacklevel=2,
            )
        written = [
            name
            for name, parameter in (() if model is None else model.named_parameters())
            if parameter.grad is None
            and name not in self._told
            and is_kept(value := parameter.detach())
            and has_nan(value)
        ]
        self._told.update(written)
        if written:
            warnings.warn(
                f"A step was skipped because something was not finite, and these parameters of {self.kind}, which have no gradient, hold "
                f"a NaN: {some(written)}. Only buffers are restored. Register tensors that a forward writes as buffers, and load these "
                f"parameters from a checkpoint, or set them again.",
                RuntimeWarning,
                stacklevel=2,
            )


class _Still(NamedTuple):
    """A large buffer that is not copied because it does not change, and its state when it was last compared.

    Attributes:
        table: The dict of a module that holds the buffer.
        key: The buffer's key in the dict.
        mark: The buffer's ``id`` and version.
        content: A checksum of its values.
        sound: Whether it held no NaN.
    """

    table: Table
    key: str
    mark: tuple[int, int]
    content: int
    sound: bool


def _mark(buffer: Tensor | None) -> tuple[int, int]:
    return id(buffer), -1 if buffer is None else _torch.tensors.version(buffer)


def _content(buffer: Tensor) -> int:
    """Return a checksum of a buffer's bits, by which a change is noticed."""
    values = values_of(buffer)
    return int(values.view(_INTEGERS[values.itemsize]).sum(dtype=torch.int64))
