"""Buffers that training writes: a step that is skipped leaves none of them poisoned.

A forward writes running statistics, codebooks and averages before anybody knows whether its step will be made. Where the
step is skipped because something is not finite, each floating buffer that became non-finite in its window gets back, whole,
what it held when the window's first forward began. Any other buffer stays as the forward left it, as in a loop by hand:
each is judged by itself, since nothing says which buffers belong together.

No version counter sees the kernels of BatchNorm, writes through ``.data``, or compiled code. So values are copied in every
window whether or not they changed: all floating buffers at first, later small ones and those whose values were seen to
change. A large buffer that does not change, such as a mask or a table, is compared at doubling distances.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
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
"""Bytes above which a buffer that does not change is not copied."""
_UNSEEN = 8
"""After this many rounds without a call of the whole model in eager mode, copies are made after steps."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_registered = 0
"""How often a module became another's child, in this process."""


def _note_module(*_: object) -> None:
    global _registered
    _registered += 1


@functools.cache
def _watch_modules() -> None:
    register_module_module_registration_hook(_note_module)


class Buffers:
    """The buffers of a session's models.

    Attributes:
        number: How many steps have ended: the number of the window.
        rounds: How often an optimizer has stepped again; several may step after one forward.
        backwards: How many losses the session has seen.
    """

    def __init__(self) -> None:
        self.number = self.rounds = self.backwards = 0
        self._stepped: tuple[set[int], set[int]] = set(), set()
        """Optimizers that stepped in the last round, and in this one."""
        self._kept: list[weakref.ref[KeptBuffers]] = []
        self._counts: Counter[str] = Counter()
        self._unread: dict[tuple[str, ...], Tensor] = {}
        self.before_forward: Callable[[], object] = int
        """Puts back what a batch has poisoned whose gradients were looked at and then passed over."""

    def follow(self, model: nn.Module) -> KeptBuffers:
        """Keep the buffers of a model, for as long as the caller keeps what is returned."""
        _watch_modules()
        kept = KeptBuffers(model, self)
        self._kept = [*(one for one in self._kept if one() is not None), weakref.ref(kept)]
        kept.take()
        return kept

    def _alive(self) -> list[KeptBuffers]:
        return [kept for one in self._kept if (kept := one()) is not None]

    def end_window(self, optimizer: Optimizer) -> None:
        """After a step of this optimizer, made or skipped."""
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
        """Put back the buffers that became non-finite since their window began.

        Args:
            flag: 0-dim fp32: do so where it is above zero, without waiting for the device. None: the step was skipped.
            of: Those of one model alone.
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
        """How often each buffer was put back. Waits for the device where a fused optimizer on it decided."""
        unread, self._unread = self._unread, {}
        for names, counts in unread.items():
            self._counts.update(dict(zip(names, counts.tolist(), strict=True)))
        return {name: count for name, count in self._counts.items() if count}


class KeptBuffers:
    """Copies of one model's buffers, as they were when its window began.

    Attributes:
        kind: The model's class.
        seen: The last round in which the whole model was called, outside of compiled code.
    """

    def __init__(self, model: nn.Module, session: Buffers) -> None:
        self.kind = type(model).__name__
        self.seen = -_UNSEEN - 1
        self._taken = -1
        self._unused = (-1, -1)
        """The window of the last forward with gradients, and the losses that had been seen when it began."""
        self._unsure = False
        """Whether only forwards without gradients were seen in this window, as where statistics are computed anew."""
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
        """Buffers that are None as yet."""
        self._is_bare = False
        """Whether the model has no buffers that could be kept."""
        self._still: dict[str, _Still] = {}
        self._moving: set[str] = set()
        self._told: set[str] = set()
        self._windows = 0

    def forget(self) -> None:
        """Let go of all that belongs to the model."""
        self._tables, self._groups, self._empty = [], [], []
        self._still.clear()

    # --- copies ---------------------------------------------------------------------------------------------

    def begin(self, training: bool) -> None:
        """A forward of the whole model begins: the first one in a window that trains, or may write, finds what is good."""
        session = self._session
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
            return  # nothing is written, or other buffers are in their place, perhaps
        if self._taken == session.number:
            _torch.tensors.outside_dispatch_modes(_torch.tensors.without_grad, self._take_sound)
        else:
            self._taken, self.seen = session.number, session.rounds
            self.begin_window()
        self._unsure = not grad

    def forget_unused(self) -> None:
        """Put back what a forward has poisoned of which no loss came, as where a loss that is not finite is passed over.

        A NaN tells of it; an infinity by itself may be meant, and of a forward that is used in another way nothing is known.
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
        """Take what lies there now as good, and look now and then for large buffers that change, or do not."""
        self._windows += 1
        self.take(look=self._windows > 1 and self._windows & (self._windows - 1) == 0)

    def take(self, *, look: bool = False) -> None:
        """Take what lies there now as good."""
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
        """Make room for copies of the buffers that there are."""
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
                    self._layout = (-1, -1)  # what comes in its place is looked at then
        self._groups = [*groups.values()]
        self._is_bare = not (groups or self._empty or self._still or self._layout[0] < 0)
        for group in self._groups:
            group.lay_out()

    # --- large buffers that do not change -----------------------------------------------------------------------

    def _stirred(self) -> bool:
        """Whether a buffer that did not change was written or replaced, as far as versions tell."""
        moved = [
            name for name, still in self._still.items() if still.mark != _mark(still.table.get(still.key))
        ]
        for name in moved:
            del self._still[name]
            self._moving.add(name)
        return bool(moved)

    def _look(self) -> bool:
        """Compare large buffers with what they were; whether what is to be copied changed. Waits for the device."""
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
        """As :meth:`Buffers.put_back`."""
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
        """Warn of buffers that hold a NaN and of which there is no copy, and of parameters that are used as buffers."""
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
                f"be restored: {some(lost)}. Their earlier values were not kept, since they were made in this window or had "
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
                f"a NaN: {some(written)}. Only buffers are restored. Keep what a forward writes in buffers, and load these "
                f"parameters from a checkpoint, or set them again.",
                RuntimeWarning,
                stacklevel=2,
            )


class _Still(NamedTuple):
    """A large buffer that did not change, and what it was when that was last seen."""

    table: Table
    key: str
    mark: tuple[int, int]
    content: int
    sound: bool


def _mark(buffer: Tensor | None) -> tuple[int, int]:
    return id(buffer), -1 if buffer is None else _torch.tensors.version(buffer)


def _content(buffer: Tensor) -> int:
    """A number that is another one where bits of a buffer are others."""
    values = values_of(buffer)
    return int(values.view(_INTEGERS[values.itemsize]).sum(dtype=torch.int64))
