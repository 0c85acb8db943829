"""Keep what a step that went wrong began with, so that it can be made again: batch, random state, weights.

Until something goes wrong that costs nearly nothing: of each batch a reference is kept and the states of the random
generators, and the buffers that the forward may move. Weights need no copy: a step that is skipped leaves them as they were,
and a loss that is not finite is seen before its backward.
"""

from __future__ import annotations

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

from castwise import _torch
from castwise.errors import CheckpointError, PlanError, StateError, check_count
from castwise.monitor import step_files
from castwise.monitor.moments import Moment
from castwise.monitor.passes import gradients_not_finite
from castwise.parallel.wrappers import unwrap
from castwise.ranks import Ranks
from castwise.ranks.pieces import is_dtensor
from castwise.scaler import StepResult
from castwise.session import Amp

LARGE = 64 << 20
"""Bytes of weights from which on a checkpoint is looked for that they can be told by."""


@dataclasses.dataclass
class _Step:
    """What is known of the step that is on its way."""

    moments: list[Moment] = dataclasses.field(default_factory=list)
    losses: list[tuple[int, str, Tensor]] = dataclasses.field(default_factory=list)
    """Which moment each belongs to, its name, and its value, which is nobody else's memory."""
    scales: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    weights: dict[str, Any] | None = None
    """A copy, where one had to be made."""
    over: bool = False
    why: tuple[str, str] | None = None
    """What kind of trouble somebody has seen, and what they say of it."""


class Recorder:
    """Writes steps that overflow, and those that it is asked to, into folders that :func:`castwise.replay` makes again.

        with castwise.Recorder(amp, model, "runs/a/failures") as recorder:
            for batch in recorder.batches(loader):
                amp.backward(loss(model, batch))
                amp.step(optimizer)
                optimizer.zero_grad()

    Written are steps that were skipped, or ended by an error, and losses that are not finite; and what :meth:`write` is asked
    for, as by an alarm. Of each kind the first few: those that follow seldom say more. A record that cannot be written is
    a warning, and the training goes on.

    On an accelerator the host waits at each step for the loss and for whether it was skipped.

    Args:
        amp: The session.
        model: What it has prepared; DistributedDataParallel and ``torch.compile`` around it are seen through.
        folder: Of the records; each rank of several writes into ``rank-1`` and so on in it.
        workload: By which name the job can be found again, as in :func:`castwise.workload.find_workload`.
        checkpoints: A folder of :func:`castwise.checkpoint.save`. Weights of 64 MiB and more are written as what differs from
            the newest there, whose files the record keeps by hard links.
        most: Records of each kind.
        copies: Copy the weights before every step, so that an alarm about a step that was made gets this step, and not the
            one that follows.

    Raises:
        PlanError: ``most`` below 1.
        StateError: A model that this session has not prepared, or one whose parameters are cut into shards.
    """

    records: tuple[Path, ...]
    """What has been written by this process."""

    def __init__(
        self,
        amp: Amp,
        model: nn.Module,
        folder: str | os.PathLike[str],
        *,
        workload: str | None = None,
        checkpoints: str | os.PathLike[str] | None = None,
        most: int = 3,
        copies: bool = False,
    ) -> None:
        check_count("Recorder", "most", most, 1)
        self._model = check_prepared("Recorder", amp, model)
        if any(is_dtensor(parameter) for parameter in self._model.parameters()):
            raise StateError(
                "Recorder: parameters of the model are cut into shards, and a record is of one process alone; record a run under "
                "DistributedDataParallel, or replay from a checkpoint of all ranks"
            )
        ranks = Ranks()
        self._amp, self._workload, self._most, self._copies = amp, workload, most, copies
        self._folder = Path(folder) / (f"rank-{ranks.rank}" if ranks.rank else "")
        self._checkpoints = None if checkpoints is None else Path(checkpoints)
        self._world = ranks.size
        self._counts: dict[str, int] = {}
        self._number = 0
        self._step: _Step | None = None
        self._next: tuple[str, str] | None = None
        self._buffers: dict[str, tuple[int, int, Tensor]] = {}
        self.records = ()
        self._end = amp.listen(self._on_loss, self._on_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            self._fail(error)
        self.close()

    def close(self) -> None:
        """Watch the session no longer. Records stay."""
        self._end()
        self._step, self._buffers = None, {}

    # --- what a training tells --------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, each noted before it is handed out; several for a step where gradients are accumulated."""
        for batch in loader:
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
        """Copies of the buffers; of those that nobody has written to since the last ones."""
        for name, buffer in self._model.named_buffers():
            known = self._buffers.get(name)
            now = (id(buffer), _torch.version(buffer))
            if known is None or known[:2] != now:
                self._buffers[name] = (*now, buffer.detach().clone())
        return {name: copy for name, (_, _, copy) in self._buffers.items()}

    def _copy_weights(self) -> dict[str, Any]:
        weights = self._amp.model_state_dict(self._model)
        return {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in weights.items()
        }

    def _on_loss(self, loss: Tensor, name: str) -> None:
        step = self._step
        if step is None or step.over:
            return
        value = loss.detach().clone()
        step.losses.append((len(step.moments) - 1, name, value))
        if self._amp.scaler.is_enabled():
            step.scales.setdefault(name, self._amp.scaler.scale_tensor(name).detach().clone())
        if step.why is None and not math.isfinite(float(value)):
            step.why = "loss", f"the loss is {float(value)}"
            if step.weights is None and self._wants("loss"):
                step.weights = self._copy_weights()

    def _on_step(self, _: Sequence[Optimizer], result: StepResult) -> None:
        step = self._step
        if step is None:
            return
        skipped = result.skipped
        if not step.over and (skipped or step.why is not None):
            kind, text = step.why or ("overflow", "the step was skipped, since gradients are not finite")
            self._write(step, kind, text, skipped, result.grad_norm)
        step.over = True

    def _fail(self, error: Exception) -> None:
        step = self._step
        if step is not None and not step.over and step.moments:
            kind, _ = step.why or ("error", "")
            self._write(step, kind, f"{type(error).__name__}: {error}", None, None)
            step.over = True

    # --- records ----------------------------------------------------------------------------------------------

    def write(self, alarm: object = "asked for") -> None:
        """Have a step written: with ``copies`` the one on its way or just made, else the next.

        Args:
            alarm: What for, as text or anything that is shown as text. So it can be given to what calls upon alarms.
        """
        if not self._wants("alarm"):
            return
        why, step = ("alarm", str(alarm)), self._step
        if step is None or step.weights is None:  # the weights may have moved already
            self._next = why
        elif step.over:
            self._write(step, *why, None, None)
        elif step.why is None:
            step.why = why

    def _wants(self, kind: str) -> bool:
        return self._counts.get(kind, 0) < self._most

    def _write(self, step: _Step, kind: str, text: str, skipped: bool | None, norm: Tensor | None) -> None:
        if not step.moments or not self._wants(kind):
            return
        self._counts[kind] = self._counts.get(kind, 0) + 1
        try:
            path = self._record(step, kind, text, skipped, norm)
        except (CheckpointError, OSError) as error:
            warnings.warn(
                f"Recorder: the step was not written, and the training goes on: {error}", stacklevel=3
            )
        else:
            self.records += (path,)

    def _record(self, step: _Step, kind: str, text: str, skipped: bool | None, norm: Tensor | None) -> Path:
        model, amp = self._model, self._amp
        weights = step.weights if step.weights is not None else amp.model_state_dict(model)
        moments = [{"batch": m.batch, "random": m.random, "changed": m.changed} for m in step.moments]
        content = {
            "kind": kind,
            "reason": text,
            "step": self._number,
            "workload": self._workload,
            "plan": amp.plan.to_json(),
            "device": amp.device_type,
            "threads": torch.get_num_threads(),
            "world_size": self._world,
            "moments": moments,
            "losses": [{"moment": at, "name": name, "value": value} for at, name, value in step.losses],
            "scales": dict(step.scales),
            "buffers": dict(step.buffers),
            "training": [name for name, module in model.named_modules() if module.training],
            "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
            "nonfinite": gradients_not_finite(model),
            "skipped": skipped,
            "grad_norm": None if norm is None else norm.detach().float().cpu(),
        }
        about = {
            "castwise": importlib.import_module("castwise").__version__,
            "torch": torch.__version__,
            "plan": str(amp.plan),
            "digest": amp.plan.digest,
        }
        return step_files.write(self._folder, self._number, content, weights, about, self._base(weights))

    def _base(self, weights: dict[str, Any]) -> step_files.Base | None:
        size = sum(value.nbytes for value in weights.values() if isinstance(value, Tensor))
        if self._checkpoints is None or size < LARGE:
            return None
        base = step_files.Base.newest(self._checkpoints)
        same = base is not None and base.path.stat().st_dev == _nearest(self._folder).stat().st_dev
        return base if same else None


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest around it that there is."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def check_prepared(call: str, amp: Any, model: Any) -> nn.Module:
    """The module inside all wrappers, if a session has prepared it.

    Raises:
        PlanError: No session, or no module.
        StateError: Another session has, or none.
    """
    if not isinstance(amp, Amp) or not isinstance(model, nn.Module):
        raise PlanError(
            f"{call}({type(amp).__name__}, {type(model).__name__}) is not allowed. Allowed: the castwise.Amp of the training, then "
            "the model that it has prepared."
        )
    inner = unwrap(model)
    if Amp.of(inner) is not amp:
        raise StateError(
            f"{call}: this {type(inner).__name__} was not prepared by this Amp; call amp.prepare(model, optimizer) first"
        )
    return inner
