"""Observe a training step for a monitor, and make a sample of its statistics."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from castwise.core import _torch
from castwise.core.session.amp import Amp, SessionView
from castwise.lab.watch.history import LossWatch
from castwise.lab.watch.records import RegionSample, Sample
from castwise.lab.watch.statistics import (
    Number,
    Outputs,
    Update,
    aside,
    join,
    owners,
    read,
    region_of,
    shares,
)
from castwise.lab.watch.turns import Turn

_T = TypeVar("_T")


class Sampler:
    """Observes the gradients, weights, updates and outputs of a session's models.

    Args:
        amp: The session.

    Attributes:
        outputs: Observes the outputs of modules.
        unseen: Values that could not be observed, with the reason for each.
        watch: Compares each loss with earlier losses.
        reads: Whether each loss is read immediately. If not, only the losses of samples are read, for which the host waits
            anyway.
        skipped_before: Number of steps that were skipped before the session was made.
    """

    def __init__(self, amp: Amp) -> None:
        self.outputs = Outputs(amp.device_type)
        self.unseen: dict[str, None] = {}
        self.skipped_before = 0
        self._amp, self._session = amp, SessionView(amp)
        self._blind = 0
        self._compiled: weakref.WeakSet[nn.Module] | None = None
        self._dropped: Any = WeakIdKeyDictionary()
        self._logged = False
        self._losses: dict[str, Tensor] = {}
        self._read: float | None = None
        self._first: str | None = None
        """Name of the first loss."""
        self.watch, self.reads = LossWatch(), False
        self._last: dict[int, Update] = {}
        """The last observed step of each optimizer."""

    def hear(self, loss: Tensor, name: str) -> None:
        """Keep the latest loss of each name for the next sample.

        If losses are read immediately, compare it with earlier losses.
        """
        if self._first is None:
            self._first = name
            self.reads = loss.device.type == "cpu" and self._session.ranks.size == 1
        if not self.reads:
            self._losses[name] = loss.detach()
        elif name == self._first and loss.numel() == 1:
            self._read = loss.item()
            self.watch.add(self._read)

    def trained(self) -> list[str]:
        """Return the paths of modules with parameters of their own that require a gradient."""
        return [
            path
            for path, module in owners(self._session.members.models)
            if any(p.requires_grad for p in module.parameters(recurse=False))
        ]

    def look(self, optimizer: Optimizer, turn: Turn) -> None:
        """Observe gradients and weights before a step, and store the results in ``turn.update``."""
        pieces, world = self._session.agreement.pieces, self._session.ranks.size
        update = Update(
            optimizer,
            region_of(self._session.members.models),
            lambda p: pieces.count(p) / world if world > 1 else 1.0,
        )
        if not turn.closure:
            aside(self._amp.device_type, update.see_gradients)
        aside(self._amp.device_type, update.see_weights)
        last = self._last.get(turn.number)
        if last is not None:
            aside(self._amp.device_type, update.see_drift, last)
        # fused kernels unscale gradients themselves
        update.scaled = getattr(optimizer, "grad_scale", None) is not None
        turn.update = update

    def look_again(self, turn: Turn, update: Update) -> None:
        """Observe the weights after a step."""
        if turn.closure:
            aside(self._amp.device_type, update.see_gradients)
        aside(self._amp.device_type, update.see_update)
        self._last[turn.number] = update

    def arm(self, every: Iterable[Turn]) -> None:
        """Begin to observe the outputs of modules if the next step is a sample; else stop.

        The first step is left out, because code that was compiled with hooks on its modules is recompiled when the hooks are
        removed.
        """
        session = self._session
        held = len(session.members.optimizers)
        turns = [turn for turn in every if turn.number < held]
        due = self._blind < 2 and any(turn.due and turn.steps for turn in turns)
        if due == self.outputs.armed:
            return
        if not due:
            self.outputs.disarm()
            return
        models = session.members.models
        if self._compiled is None:
            self._compiled = weakref.WeakSet(_torch.dynamo.inside_compiled(models))
        if not self._logged:
            self._logged = True
            alive = weakref.ref(self)
            session.undo.callback(lambda: _put_down(alive))
        self.outputs.arm(models, self._compiled)

    def _put_down(self) -> None:
        """Remove all hooks from the models when the session is closed."""
        self._logged, self._compiled, self._blind = False, None, 0
        self.outputs.disarm()

    def sample(self, turn: Turn, update: Update | None, skipped: bool | None) -> Sample:
        """Make the sample of a step, combined over ranks. All ranks must call this; it waits for the device."""
        outputs = self.outputs.take()
        found = [*outputs, *([] if update is None else update.numbers)]
        if self._losses:
            losses = [loss.float().mean() for loss in self._losses.values()]
            found.append(
                Number("", "max_loss", torch.stack([one.to(losses[0].device) for one in losses]).sum())
            )
            self._losses = {}
        scaler = self._amp.scaler
        scales = self._session.window.scales
        if scales:
            found.append(Number("", "max_scale", scaler.scale_tensor()))
        mine = self.attempt("figures", read, found) or {}
        self._add_lost(mine)
        ranks = self._session.ranks
        numbers = join(ranks.duplicate("looking").gather(mine)) if ranks.size > 1 else mine
        if self.outputs.failed:
            self.note_unseen(self.outputs.failed)
        if turn.steps > 1 and self._blind < 2 and self.outputs.armed:
            self._blind = 0 if outputs else self._blind + 1
        if self._compiled or self._blind > 1:
            which = "compiled modules" if self._compiled and outputs else "modules"
            self.note_unseen(
                f"outputs of {which} and their gradients, because torch.compile does not call modules one by one"
            )
        scale, loss = numbers.pop(("", "max_scale"), None), numbers.pop(("", "max_loss"), None)
        if self.reads:
            loss, self._read = self._read, None
        elif loss is not None:
            self.watch.add(loss)
        unscaled = 1.0 if update is None or not update.scaled or not scale else scale
        regions = []
        for path in dict.fromkeys(region for region, _ in numbers):
            said = shares(numbers, path)
            if unscaled != 1.0 and said["grad_norm"] is not None:
                said["grad_norm"] /= unscaled
            regions.append(RegionSample(path, **said))
        whole = shares(_whole(numbers), "")
        return Sample(
            turn.steps, turn.number, skipped, self.skipped_before + self._session.window.skips, scale,
            None if whole["grad_norm"] is None else whole["grad_norm"] / unscaled,
            whole["update_ratio"], whole["lost_updates"], tuple(regions), loss,
        )  # fmt: skip

    def _add_lost(self, numbers: dict[tuple[str, str], float]) -> None:
        """Add the updates that rounding has dropped since the last sample."""
        counts = list(self._session.dropped.by_parameter.items())
        regions = region_of(self._session.members.models) if counts else {}
        for parameter, (moved, lost) in counts:
            before = self._dropped.get(parameter, (0.0, 0.0))
            path = regions.get(id(parameter), "")
            for name, square in (("moved", moved - before[0]), ("lost", max(0.0, lost - before[1]))):
                if moved > before[0]:
                    numbers[path, name] = numbers.get((path, name), 0.0) + square
            self._dropped[parameter] = moved, lost

    def attempt(self, what: str, call: Callable[..., _T], *args: Any) -> _T | None:
        """Make an observation. If it fails, that is noted and training continues."""
        try:
            return call(*args)
        except Exception as error:
            self.note_unseen(f"{what}: {type(error).__name__}: {error}")
            return None

    def note_unseen(self, what: str) -> None:
        """Note that something could not be observed. Each text is noted once."""
        self.unseen.setdefault(what)


def _whole(numbers: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    return join({("", name): value} for (_, name), value in numbers.items())


def _put_down(alive: weakref.ref[Sampler]) -> None:
    sampler = alive()
    if sampler is not None:
        sampler._put_down()
