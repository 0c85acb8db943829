"""Keep what a step that went wrong began with, so that it can be made again: batch, random state, weights.

Until something goes wrong that costs nearly nothing: of each batch a reference is kept and the states of the random
generators, and the buffers that the forward may move. Weights need no copy: a step that is skipped leaves them as they were,
and a loss that is not finite is seen before its backward.

Ranks that train one model write one record together: each its batches, random states and buffers, and of the weights what no
other has written. Whether there is something to write they ask each other at every step, so that none waits for another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core.checkpoint.folder import candidates
from castwise.core.masters import OfThisProcess
from castwise.core.parallel import wrappers
from castwise.core.ranks import ALONE, Ranks
from castwise.core.ranks.pieces import is_dtensor
from castwise.core.ranks.text import named
from castwise.core.scaler import StepResult
from castwise.core.session.amp import Amp, SessionView
from castwise.errors import CheckpointError, PlanError, StateError, check_count
from castwise.lab.watch import step_files
from castwise.lab.watch.following import follow
from castwise.lab.watch.moments import Moment
from castwise.lab.watch.passes import gradients_not_finite

KINDS = ("loss", "error", "alarm", "overflow")
"""Kinds of records, the most telling first."""


@dataclasses.dataclass
class _Step:
    """What is known of the step that is on its way."""

    moments: list[Moment] = dataclasses.field(default_factory=list)
    losses: list[tuple[int, str, Tensor]] = dataclasses.field(default_factory=list)
    """For each the moment that it belongs to, its name, and its value in memory of its own."""
    scales: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    weights: dict[str, Any] | None = None
    """A copy, where one had to be made."""
    over: bool = False
    """Whether a step was made on its batches, so that the next batch begins another."""
    begun: bool = False
    """Whether an optimizer has begun to step, so that the weights may have moved."""
    moved: bool = False
    """Whether the weights to be written are not those that the batches met."""
    done: bool = False
    """Whether it was written, or can no longer be."""
    why: tuple[str, str] | None = None
    """What kind of trouble was seen, and what was said of it."""


class Recorder(OfThisProcess):
    """Writes steps that overflow, and those that it is asked to, into folders that :func:`castwise.replay` makes again.

        with castwise.Recorder(amp, model, "runs/a/failures") as recorder:
            for batch in recorder.batches(loader):
                amp.backward(loss(model, batch))
                amp.step(optimizer)
                optimizer.zero_grad()

    Written are steps that were skipped, or ended by an error, and losses that are not finite; and what :meth:`write` is asked
    for, as by an alarm. Of each kind the first few: those that follow seldom say more. A record that cannot be written is
    a warning, and the training goes on.

    Where the session has several ranks each makes the same recorder, under DistributedDataParallel and FSDP2 alike: a step that
    went wrong on one of them is written by all, as one record. An error that a rank ends by is written by that rank alone, as
    others may know nothing of it; where the model is cut into shards a warning says that it was not.

    On an accelerator the host waits at each step for the loss and for whether it was skipped.

    Args:
        amp: The session.
        model: What it has prepared; DistributedDataParallel, FSDP2 and ``torch.compile`` around it are seen through.
        folder: Of the records, on a file system that all ranks see; a rank that ends by an error writes into ``rank-1`` and so
            on in it. Numbers go on behind those of the records that are there.
        workload: By which name the job can be found again, as in :func:`castwise.workload.find_workload`. A replay shows the name, and
            runs it only where it is given again.
        most: Records of each kind.
        copies: Copy the weights before every step, so that an alarm about a step that was made gets this step, and not the
            one that follows.

    Raises:
        PlanError: ``most`` below 1.
        StateError: A model that this session has not prepared, a stage of a pipeline, or one with weights that were cut by hand.
    """

    records: tuple[Path, ...]
    """What has been written, by this rank or by all."""

    def __init__(
        self,
        amp: Amp,
        model: nn.Module,
        folder: str | os.PathLike[str],
        *,
        workload: str | None = None,
        most: int = 3,
        copies: bool = False,
    ) -> None:
        check_count("Recorder", "most", most, 1)
        self._model = check_prepared("Recorder", amp, model)
        self._amp, self._session = amp, SessionView(amp)
        self._workload, self._most, self._copies = workload, most, copies
        self._folder, self._is_cut = Path(folder), any(map(is_dtensor, self._model.parameters()))
        self._counts: dict[str, int] = {}
        # behind what an earlier process has left there
        self._number = Ranks(self._session.ranks.group, CheckpointError).first(lambda: _last_of(self._folder))
        self._closed = self._heard = False
        self._step: _Step | None = None
        self._next: tuple[str, str] | None = None
        self.records = ()
        self._end = follow(amp, self._on_loss, self._on_step, self._on_begin)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            self._fail(error)
        self.close()

    def close(self) -> None:
        """Watch the session no longer. Records stay."""
        self._end()
        self._step, self._closed = None, True

    # --- what a training tells --------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, each noted before it is handed out; several for a step where gradients are accumulated.

        Raises:
            StateError: This recorder was closed, or its session was.
        """
        if self._closed:
            raise StateError("Recorder.batches: this recorder was closed; make a new one")
        check_prepared("Recorder.batches", self._amp, self._model)
        for batch in loader:
            if not self._closed:
                self._begin(batch)
            yield batch

    def _begin(self, batch: Any) -> None:
        if self._step is None or self._step.over:
            self._step = step = _Step(buffers=self._copy_buffers())
            self._number += 1
            step.why, self._next = self._next, None
            if self._copies or step.why is not None:
                step.weights = self._copy_weights()
        self._step.moments.append(Moment.of(batch, self._amp))

    def _copy_buffers(self) -> dict[str, Tensor]:
        """Copies of all buffers: writing through ``.data``, and assigning another tensor, count as no write."""
        return {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}

    def _copy_weights(self) -> dict[str, Any]:
        weights = self._amp.model_state_dict(self._model)
        return {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in weights.items()
        }

    def _on_loss(self, loss: Tensor, name: str) -> None:
        step, self._heard = self._step, True
        if step is None or step.done:
            return
        self._session.agreement.check_even("Recorder")
        value = loss.detach().clone()
        step.losses.append((len(step.moments) - 1, name, value))
        if self._amp.scaler.is_enabled():
            step.scales.setdefault(name, self._amp.scaler.scale_tensor(name).detach().clone())
        bad = not math.isfinite(float(value))
        if bad and step.why is None:
            step.why = "loss", f"the loss is {float(value)}"
        # a rank that holds all weights copies them for all; of shards each has to copy its own
        bad = self._any(bad)[0] if self._is_cut else bad
        if bad and step.weights is None and self._wants("loss"):
            step.weights, step.moved = self._copy_weights(), step.begun

    def _on_begin(self) -> None:
        if self._step is not None:
            self._step.begun = True

    def _on_step(self, _: Sequence[Optimizer], result: StepResult) -> None:
        step = self._step
        if step is None:
            return
        if not self._heard:
            self._heard = True
            warnings.warn(
                "Recorder: a step was made without a recorded loss: a non-finite loss would not be noticed, and a replay "
                "cannot be checked against it. Call amp.backward(loss), or amp.scale(loss).backward(), instead of "
                "loss.backward()",
                stacklevel=3,
            )
        if not step.done:
            skipped, has = result.skipped, step.weights is not None
            if skipped and step.why is None:
                step.why = "overflow", "the step was skipped, since gradients are not finite"
            step.moved |= not has and step.over  # by another optimizer's step
            why = step.why if step.why is not None and self._wants(step.why[0]) else None
            wrong, some_have, some_lack = self._any(why is not None, has, not has)
            if wrong and (skipped or (not some_lack if self._is_cut else some_have)):
                step.done = True
                self._write(step, skipped, result.grad_norm)
            elif wrong:  # the weights have moved: the next step, by all
                self._next = "alarm", f"the step before: {why[1]}" if why else ""
                step.done = True
        step.over = True

    def _any(self, *flags: bool) -> tuple[bool, ...]:
        """Each of some flags, whether it is set on any rank."""
        ranks = self._session.ranks
        if ranks.size == 1:
            return flags
        told = torch.tensor(flags, dtype=torch.float32, device=self._amp.device_type)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=ranks.group)
        return tuple(bool(one) for one in told.tolist())

    def _fail(self, error: Exception) -> None:
        step = self._step
        if step is None or step.over or not step.moments:
            return
        step.over = True
        kind, _ = step.why or ("error", "")
        step.why = kind, f"{type(error).__name__}: {error}"
        if step.begun and step.weights is None:
            warnings.warn(
                f"Recorder: the step that ended in an error ({type(error).__name__}) was not written: its optimizer had begun "
                f"to overwrite the weights that the step started from; Recorder(..., copies=True) keeps a copy",
                stacklevel=3,
            )
        elif self._is_cut and self._session.ranks.size > 1:
            warnings.warn(
                f"Recorder: the step that ended in an error ({type(error).__name__}) was not written: other ranks hold the rest of "
                "the weights, and may have seen no error",
                stacklevel=3,
            )
        else:
            self._write(step, None, None, together=False)

    # --- records ----------------------------------------------------------------------------------------------

    def write(self, alarm: object = "asked for") -> None:
        """Have a step written: with ``copies`` the one on its way or just made, else the next. All ranks ask together.

        Args:
            alarm: What for, as text or anything that is shown as text. So it can be given to what calls upon alarms.
        """
        if not self._wants("alarm"):
            return
        why, step = ("alarm", str(alarm)), self._step
        alike = self._copies or self._session.ranks.size == 1  # else one rank alone may have copied them
        if step is None or step.weights is None or not alike:  # the weights may have moved already
            self._next = why
        elif step.over and not step.done:
            step.why, step.done = why, True
            self._write(step, None, None)
        elif step.why is None:
            step.why = why

    def _wants(self, kind: str) -> bool:
        return self._counts.get(kind, 0) < self._most

    def _write(self, step: _Step, skipped: bool | None, norm: Tensor | None, together: bool = True) -> None:
        """Write a step, of all ranks or of this one alone."""
        ranks = self._session.ranks if together else Ranks(ALONE)
        whys = ranks.gather(step.why)
        kind, text = _joined([why if why and why[1] else None for why in whys])
        if not step.moments or not self._wants(kind):
            return
        self._counts[kind] = self._counts.get(kind, 0) + 1
        about = {"kind": kind, "reason": text, "skipped": skipped}
        try:
            path = self._record(step, about, norm, ranks)
        except (CheckpointError, OSError) as error:
            warnings.warn(
                f"Recorder: the step could not be written; training continues: {error}", stacklevel=3
            )
        else:
            self.records += (path,)

    def _record(self, step: _Step, about: dict[str, Any], norm: Tensor | None, ranks: Ranks) -> Path:
        model, amp = self._model, self._amp
        weights = step.weights or ({} if about["skipped"] is False else amp.model_state_dict(model))
        ddp = wrappers.ddp_around(model) if ranks.size > 1 else None
        shared = ddp is not None and ddp.broadcast_buffers  # the first rank's, before each forward
        content = {
            **about,
            "step": self._number,
            "workload": self._workload,
            "plan": amp.plan.to_json(),
            "device": amp.device_type,
            "threads": torch.get_num_threads(),
            "world_size": self._session.ranks.size,
            "rank": self._session.ranks.rank,
            "moments": [{"batch": m.batch, "random": m.random, "changed": m.changed} for m in step.moments],
            "losses": [{"moment": at, "name": name, "value": value} for at, name, value in step.losses],
            "scales": dict(step.scales),
            "buffers": {} if shared and ranks.rank else dict(step.buffers),
            "shared_buffers": shared,
            "training": [name for name, module in model.named_modules() if module.training],
            "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
            "nonfinite": gradients_not_finite(model),
            "moved": step.moved,
            "grad_norm": None if norm is None else norm.detach().float().cpu(),
        }
        made_by = {
            "castwise": importlib.import_module("castwise").__version__,
            "torch": torch.__version__,
            "plan": str(amp.plan),
            "digest": amp.plan.digest,
        }
        folder = self._folder
        if ranks.size < self._session.ranks.size and self._session.ranks.rank:
            folder = folder / f"rank-{self._session.ranks.rank}"
        return step_files.write(folder, self._number, content, weights, made_by, ranks.group)


def _last_of(folder: Path) -> int:
    """The largest number of a record in a folder, and in those of ranks in it; 0 where there is none."""
    with contextlib.suppress(OSError):
        return max(
            (step for home in (folder, *folder.glob("rank-*")) for step, _ in candidates(home)), default=0
        )
    return 0


def _joined(whys: Sequence[tuple[str, str] | None]) -> tuple[str, str]:
    """What is most telling of what ranks have seen, and on which."""
    kind = min((why[0] for why in whys if why), key=KINDS.index, default="alarm")
    ranks_of: dict[str, list[int]] = {}
    for rank, why in enumerate(whys):
        if why and why[0] == kind:
            ranks_of.setdefault(why[1], []).append(rank)
    if len(ranks_of) == 1 and len(next(iter(ranks_of.values()))) == len(whys):
        return kind, next(iter(ranks_of))
    return kind, "; ".join(f"on {named(ranks)}: {text}" for text, ranks in ranks_of.items())


def check_prepared(call: str, amp: Any, model: Any) -> nn.Module:
    """The module inside all wrappers, if a session has prepared it.

    Raises:
        PlanError: No session, or no module.
        StateError: Another session has, or none; or each rank holds a part of the model that says not of what.
    """
    if not isinstance(amp, Amp) or not isinstance(model, nn.Module):
        raise PlanError(
            f"{call}({type(amp).__name__}, {type(model).__name__}) is not allowed. Allowed: the castwise.Amp of the training, then "
            "the model that it has prepared."
        )
    inner = wrappers.unwrap(model)
    if Amp.of(inner) is not amp:
        raise StateError(
            f"{call}: this {type(inner).__name__} was not prepared by this Amp; call amp.prepare(model, optimizer) first"
        )
    if any(map(SessionView(amp).agreement.pieces.is_part, inner.parameters())):
        raise StateError(
            f"{call}: each rank holds a part of this {type(inner).__name__}, a stage of a pipeline or weights that were "
            f"sharded by hand, and no process can assemble the whole; save checkpoints instead and go back to them"
        )
    return inner
