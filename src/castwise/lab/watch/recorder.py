"""Record the inputs of a step that goes wrong, so that it can be replayed: its batches, random states and weights.

Until a step goes wrong the cost is small. The recorder keeps a reference to each batch, the states of the random generators,
and copies of the buffers that the forward may change. Weights need no copy: a skipped step leaves them unchanged, and a
non-finite loss is detected before its backward.

Ranks that train one model write one record together. Each rank writes its own batches, random states and buffers, and those
weights that no other rank has written. At every step all ranks agree whether to write, so that no rank waits for another.
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
"""Kinds of records, the most informative first."""


@dataclasses.dataclass
class _Step:
    """The inputs of the current step, and what is known about it."""

    moments: list[Moment] = dataclasses.field(default_factory=list)
    losses: list[tuple[int, str, Tensor]] = dataclasses.field(default_factory=list)
    """For each loss, the index of its microbatch, its name, and a copy of its value."""
    scales: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    weights: dict[str, Any] | None = None
    """A copy of the weights, if a copy was needed."""
    over: bool = False
    """Whether an optimizer has stepped on the step's batches, so that the next batch starts another step."""
    begun: bool = False
    """Whether an optimizer has started to step, so that the weights may have changed."""
    moved: bool = False
    """Whether the weights have changed since the step's batches were used."""
    done: bool = False
    """Whether the step was written, or can no longer be written."""
    why: tuple[str, str] | None = None
    """Why the step is to be recorded: a kind of ``KINDS`` and a description."""


class Recorder(OfThisProcess):
    """Records training steps that go wrong, so that :func:`castwise.replay` can run them again.

    Use it to find out later why a step overflowed or failed. A record has all inputs of a step: its batches, the
    states of the random generators, and the weights.

    ::

        with castwise.Recorder(amp, model, "runs/a/failures") as recorder:
            for batch in recorder.batches(loader):
                amp.backward(loss(model, batch))
                amp.step(optimizer)
                optimizer.zero_grad()

    A step is recorded if it was skipped, raised an error, had a non-finite loss, or was requested by :meth:`write`,
    for instance from an alarm. Of each of these four kinds only the first few are recorded, since later steps seldom
    add information. If a record cannot be written, a warning is given and training continues.

    With several ranks, each rank makes the same recorder, also under DistributedDataParallel and FSDP2. If a step
    goes wrong on one rank, all ranks write it together, as one record. But if a step raises an error on one rank,
    that rank writes it alone, since other ranks may not know of the error. If the model is sharded, such a step is
    not recorded, and a warning says so.

    On an accelerator, the host waits at each step for the loss and for the decision whether to skip the step.

    Args:
        amp: The :class:`castwise.Amp` that prepared the model.
        model: The prepared model. It may be wrapped in DistributedDataParallel, FSDP2 or ``torch.compile``.
        folder: The folder of the records, on a file system shared by all ranks. A rank that raises an error writes
            into a subfolder such as ``rank-1``. If the folder has records already, their numbering continues.
        workload: The name of the training job, as for :func:`castwise.workload.find_workload`. A replay shows this
            name. It runs the job's code only if the name is given again.
        most: The largest number of records of each kind.
        copies: Whether to copy the weights before every step. A request after a step, as from an alarm, then records
            that step. Without copies it records the next step.

    Raises:
        PlanError: ``most`` is below 1.
        StateError: The model was not prepared by ``amp``, is a pipeline stage, or holds weights that your own code has
            split over ranks.
    """

    records: tuple[Path, ...]
    """The paths of the records that this rank has written, alone or together with all ranks."""

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
        # continue the numbering of an earlier process
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
        """Stop recording. The records that were written stay on disk."""
        self._end()
        self._step, self._closed = None, True

    # --- events of the training -------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, and remember each batch before it is yielded.

        A step may use several batches (gradient accumulation).

        Args:
            loader: The data loader, or any other iterable of batches.

        Raises:
            StateError: This recorder was closed, or its :class:`castwise.Amp` was.
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
        """Copy all buffers, because version counters miss writes through ``.data`` and replaced tensors."""
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
        # one rank copies replicated weights for all ranks; if the weights are sharded, each rank copies its own shards
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
                "Recorder: the loss of a step was not recorded, so a non-finite loss is not noticed, and a replay cannot compare "
                "losses. Call amp.backward(loss), or amp.scale(loss).backward(), instead of loss.backward()",
                stacklevel=3,
            )
        if not step.done:
            skipped, has = result.skipped, step.weights is not None
            if skipped and step.why is None:
                step.why = "overflow", "the step was skipped because gradients are not finite"
            step.moved |= not has and step.over  # an earlier optimizer of this step has moved the weights
            why = step.why if step.why is not None and self._wants(step.why[0]) else None
            wrong, some_have, some_lack = self._any(why is not None, has, not has)
            if wrong and (skipped or (not some_lack if self._is_cut else some_have)):
                step.done = True
                self._write(step, skipped, result.grad_norm)
            elif wrong:  # the weights have changed: all record the next step instead
                self._next = "alarm", f"in the previous step: {why[1]}" if why else ""
                step.done = True
        step.over = True

    def _any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set on any rank."""
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
                "the weights, and may have had no error",
                stacklevel=3,
            )
        else:
            self._write(step, None, None, together=False)

    # --- records ----------------------------------------------------------------------------------------------

    def write(self, alarm: object = "asked for") -> None:
        """Request that a step is recorded, although it did not go wrong.

        If the recorder copies the weights (``copies=True``), the current step is recorded, or the latest step if no
        step is in progress. Otherwise the next step is recorded. All ranks must call this method.

        Args:
            alarm: The reason for the request, as text or any object. This method can thus be passed to a monitor as
                ``on_alarm``.
        """
        if not self._wants("alarm"):
            return
        why, step = ("alarm", str(alarm)), self._step
        alike = self._copies or self._session.ranks.size == 1  # else only one rank may have copied them
        if step is None or step.weights is None or not alike:  # the weights may have changed already
            self._next = why
        elif step.over and not step.done:
            step.why, step.done = why, True
            self._write(step, None, None)
        elif step.why is None:
            step.why = why

    def _wants(self, kind: str) -> bool:
        return self._counts.get(kind, 0) < self._most

    def _write(self, step: _Step, skipped: bool | None, norm: Tensor | None, together: bool = True) -> None:
        """Write a step as one record, ``together`` with all ranks or by this rank alone."""
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
        shared = ddp is not None and ddp.broadcast_buffers  # from the first rank, before each forward
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
    """Return the largest record number in a folder and its ranks' subfolders; 0 if there is none."""
    with contextlib.suppress(OSError):
        return max(
            (step for home in (folder, *folder.glob("rank-*")) for step, _ in candidates(home)), default=0
        )
    return 0


def _joined(whys: Sequence[tuple[str, str] | None]) -> tuple[str, str]:
    """Return the most informative of the reasons of all ranks, with the numbers of the ranks that have it."""
    kind = min((why[0] for why in whys if why), key=KINDS.index, default="alarm")
    ranks_of: dict[str, list[int]] = {}
    for rank, why in enumerate(whys):
        if why and why[0] == kind:
            ranks_of.setdefault(why[1], []).append(rank)
    if len(ranks_of) == 1 and len(next(iter(ranks_of.values()))) == len(whys):
        return kind, next(iter(ranks_of))
    return kind, "; ".join(f"on {named(ranks)}: {text}" for text, ranks in ranks_of.items())


def check_prepared(call: str, amp: Any, model: Any) -> nn.Module:
    """Return the module inside all wrappers, after checking that this session prepared it.

    Raises:
        PlanError: ``amp`` is not a session, or ``model`` is not a module.
        StateError: This session did not prepare the model, or the model is a pipeline stage or has hand-written shards.
    """
    if not isinstance(amp, Amp) or not isinstance(model, nn.Module):
        raise PlanError(
            f"{call}({type(amp).__name__}, {type(model).__name__}) is not allowed. Allowed: the castwise.Amp of the training, then "
            "the model that this Amp prepared."
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
