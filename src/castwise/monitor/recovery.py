"""Where a training diverges, go back to the last good state, see to what did it, and go on.

Good states are checkpoints (:mod:`castwise.checkpoint`), each whole or not there. The batches since then are kept, with the
random states that they were handed out at, so that the way back is the way that was gone, but for what is changed: a batch is
passed over, a region or the whole plan gets a safer format, a loss scale is lowered, or nothing, where the weights had been
damaged. How often is bounded, and each time is logged with its evidence.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise import checkpoint
from castwise.checkpoint.folder import candidates
from castwise.checkpoint.saving import as_list
from castwise.errors import CheckpointError, DivergedError, PlanError, StateError, check_count, sentence
from castwise.monitor.diagnosis import Verdict, diagnose
from castwise.monitor.losses import LossLine
from castwise.monitor.moments import Moment, generators, set_generators
from castwise.monitor.passes import Loss
from castwise.monitor.recorder import check_prepared
from castwise.plans.plan import Plan
from castwise.ranks import Ranks
from castwise.ranks.pieces import is_dtensor
from castwise.scaler import StepResult
from castwise.session import Amp

if TYPE_CHECKING:
    from rich.console import RenderableType

STREAK = 3
"""So many skipped steps in a row, which no loss scale would have saved, have diverged."""
LOG = "recovery.jsonl"


@dataclass(frozen=True)
class Return:
    """One return to a good state.

    Attributes:
        step: That diverged, by the order of the data.
        to_step: That training went on from.
        symptom: What was seen.
        cause: ``batch``, ``format``, ``loss scale``, ``transient``, or ``unknown`` where the step did not come again.
        evidence: What was tried, and what came of it.
        action: What was done.
        plan: That training goes on under, as a line.
    """

    step: int
    to_step: int
    symptom: str
    cause: str
    evidence: str
    action: str
    plan: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class _Good:
    """A good state: its checkpoint, the step that comes next, and where in the data that begins."""

    path: Path
    step: int
    cursor: int


@dataclass(frozen=True)
class _Kept:
    moment: Moment
    step: int


@dataclass(frozen=True)
class _Suspect:
    step: int
    to_step: int
    symptom: str


class Recovery:
    """Takes a training that diverges back to its last good state, and past what made it diverge.

        recovery = castwise.Recovery(amp, model, optimizer, loss, "runs/a/good", also={"scheduler": scheduler})
        for batch in recovery.batches(loader):
            amp.backward(loss(model, batch))
            amp.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
            scheduler.step()

    A step has diverged where its loss is not finite; where three in a row are skipped that no loss scale would save; and where
    the loss is far above what it was, at once or five times in a row (:mod:`castwise.monitor.losses`). Then weights, optimizer, loss
    scale, random generators and ``also`` become what they were, ``batches`` hands out the same batches again, and before
    the one that diverged comes again a copy of the model finds out why: :mod:`castwise.monitor.diagnosis`.

    At each step the host waits for the loss. Where torch.distributed is in use every rank makes the same recovery and all go back
    together; a step's loss is the mean over ranks.

    Args:
        amp: The session, with ``nonfinite="skip"``, which is its default.
        model: What it has prepared; DistributedDataParallel and ``torch.compile`` around it are seen through.
        optimizers: Those that update it.
        loss: What the loop does from a batch, as the loader hands it out, to the loss; as for :func:`castwise.replay`.
        folder: Of the good states, of this recovery alone, and of its log, ``recovery.jsonl``.
        also: Objects by name, with ``state_dict`` and ``load_state_dict``, that go back too: schedulers, averages of weights.
        every: Steps between two good states.
        attempts: Returns without a new good state behind what diverged; the next is an error.
        spikes: Whether finite losses count; without it only what is not finite does.
        keep_bytes: Of the batches since the last good states; of larger ones the earliest are let go, and training goes on with
            those that are left.

    Raises:
        PlanError: A number below 1, no session, no function, or ``also`` without ``state_dict``.
        StateError: A model that this session has not prepared, or one whose parameters are cut into shards.
    """

    returns: tuple[Return, ...]
    """What was done so far."""
    step: int
    """Of the batch that was handed out last, by the order of the data: it goes back too."""

    def __init__(
        self,
        amp: Amp,
        model: nn.Module,
        optimizers: Optimizer | Iterable[Optimizer],
        loss: Loss,
        folder: str | os.PathLike[str],
        *,
        also: Mapping[str, Any] | None = None,
        every: int = 100,
        attempts: int = 3,
        spikes: bool = True,
        keep_bytes: int = 1 << 30,
    ) -> None:
        for name, value in (("every", every), ("attempts", attempts), ("keep_bytes", keep_bytes)):
            check_count("Recovery", name, value, 1)
        self._inner = check_prepared("Recovery", amp, model)
        if not callable(loss):
            raise PlanError(f"Recovery(loss={loss!r}): needs a function, loss(model, batch)")
        if any(is_dtensor(parameter) for parameter in self._inner.parameters()):
            raise StateError(
                "Recovery: parameters of the model are cut into shards, of which no copy can be tried. Save checkpoints, and resume "
                "from the newest under another plan."
            )
        self._also = dict(also or {})
        for name, thing in self._also.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise PlanError(
                    f"Recovery(also={{{name!r}: {type(thing).__name__}}}): needs state_dict and load_state_dict; leave it out, or "
                    "wrap it in an object that has them"
                )
        self._amp, self._model, self._loss = amp, model, loss
        self._optimizers = as_list(optimizers)
        self._folder, self._every, self._attempts, self._spikes = Path(folder), every, attempts, spikes
        self._keep_bytes = keep_bytes
        self._ranks = Ranks()
        self._line = LossLine()
        self._goods: list[_Good] = []
        self._serial = max((step for step, _ in candidates(self._folder)), default=-1) + 1
        self._kept: list[_Kept] = []
        self._base = 0
        """How many batches were handed out before the first that is kept."""
        self._cursor = 0
        """How many batches the next one has before it."""
        self._next_step = 0
        self._passed: set[int] = set()
        self._accidents: dict[int, int] = {}
        """By step, how often its divergence was called an accident."""
        self._losses: list[Tensor] = []
        self._results: list[StepResult] = []
        self._skips: list[int] = []
        """Steps skipped in a row just now."""
        self._tries = 0
        self._furthest = -1
        """The last step that has diverged."""
        self._tried = -1
        """The step before which a good state could not be saved."""
        self._suspect: _Suspect | None = None
        self._extra: Any = None
        self._first_plan = amp.plan
        self.returns, self.step = (), -1
        self._end = amp.listen(self._on_loss, self._on_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Watch the session no longer. Good states stay on disk."""
        self._end()
        self._kept, self._losses, self._results = [], [], []

    # --- what a training tells --------------------------------------------------------------------------------

    def _on_loss(self, loss: Tensor, _: str) -> None:
        self._losses.append(loss.detach().clone())

    def _on_step(self, _: Sequence[Optimizer], result: StepResult) -> None:
        self._results.append(result)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, and after a return those since the good state again; then the loader goes on where it was.

        Call it once for each epoch: what is to be gone back to may lie in an earlier one.

        Raises:
            DivergedError: The training has diverged, and going back did not help ``attempts`` times.
            CheckpointError: There is no good state to go back to, or it cannot be read.
        """
        source = iter(loader)
        while True:
            if self._results:
                self._end_of_step()
            self._pass_over()
            if not self._losses and (not self._goods or self._is_due()):
                self._save()
            if self._suspect is not None and self._suspect.step <= self._step_of(self._cursor):
                self._decide(self._suspect)
                self._pass_over()
            kept = self._again()
            if kept is None:
                try:
                    batch = next(source)
                except StopIteration:
                    return
                moment = Moment.of(batch, self._amp)
                self._keep(_Kept(moment, self._next_step))
            else:
                moment = kept.moment
                set_generators(moment.random)
            self.step = self._kept[self._cursor - self._base].step
            self._cursor += 1
            yield moment.batch

    def _step_of(self, cursor: int) -> int:
        at = cursor - self._base
        return self._kept[at].step if 0 <= at < len(self._kept) else self._next_step

    def _pass_over(self) -> None:
        """Go past the batches that are kept and not wanted again: bad ones, and those that somebody has written into."""
        while (one := self._again()) is not None and (one.step in self._passed or one.moment.changed):
            self._cursor += 1

    def _again(self) -> _Kept | None:
        """The next batch, if it is one of those that are kept."""
        at = self._cursor - self._base
        return self._kept[at] if at < len(self._kept) else None

    def _keep(self, one: _Kept) -> None:
        self._kept.append(one)
        size = sum(each.moment.nbytes for each in self._kept)
        oldest = min((good.cursor for good in self._goods), default=0)
        while len(self._kept) > 1 and (size > self._keep_bytes or self._base < oldest):
            if self._kept[0].step == one.step:
                break
            size -= self._kept.pop(0).moment.nbytes
            self._base += 1

    # --- is it well? ------------------------------------------------------------------------------------------

    def _end_of_step(self) -> None:
        microbatches = sum(1 for one in self._kept if one.step == self.step) or 1
        value, skipped = self._seen(microbatches)
        step = self.step
        self._next_step = max(self._next_step, step + 1)
        symptom, first = self._symptom(step, value, skipped)
        if symptom:
            self._go_back(symptom, first)
        self._losses, self._results = [], []

    def _seen(self, microbatches: int) -> tuple[float, bool]:
        """The step's loss, and whether it was skipped, as all ranks see it. The host waits for the device."""
        value = sum(map(float, self._losses)) / microbatches
        skipped = any(result.skipped for result in self._results)
        if self._ranks.size > 1:
            kind = self._amp.device_type
            both = torch.tensor([value, float(skipped)], dtype=torch.float32 if kind == "mps" else torch.float64, device=kind)
            torch.distributed.all_reduce(both)
            value, skipped = float(both[0]) / self._ranks.size, bool(both[1] > 0)
        return value, skipped

    def _symptom(self, step: int, value: float, skipped: bool) -> tuple[str, int]:
        """What is wrong with a step, in a clause, and the step that it began with."""
        self._skips = [*(one for one in self._skips if one != step), step] if skipped and self._is_final() else []
        if not math.isfinite(value):
            return f"the loss is {value}", step
        if len(self._skips) >= STREAK:
            return f"{STREAK} steps in a row were skipped, since gradients are not finite", self._skips[0]
        if skipped or not self._spikes:
            return "", step
        said = self._line.judge(step, value)
        return said, self._line.suspects[0][0] if said else step

    def _is_final(self) -> bool:
        """Whether a skipped step is more than a loss scale that seeks its size."""
        scale = self._amp.plan.loss_scale
        return scale is None or not scale.dynamic or self._amp.get_scale() <= 1.0

    # --- good states ------------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        step = self._step_of(self._cursor)
        quiet = not self._line.suspects and not self._skips
        return quiet and self._suspect is None and step - max(self._goods[-1].step, self._tried) >= self._every

    def _save(self) -> None:
        if not all(bool(torch.isfinite(p).all()) for p in self._inner.parameters()):
            if not self._goods:
                raise StateError("Recovery: weights are not finite at the start, so that there is no good state to go back to")
            self._go_back("weights are not finite", self.step)
            return
        step = self._step_of(self._cursor)
        draws = {name: state for name, state in generators(self._amp).items() if name != "torch"}
        also = {name: thing.state_dict() for name, thing in self._also.items()}
        extra = {"step": step, "generators": draws, "also": also, "buffers": dict(self._unsaved_buffers())}
        try:
            path = checkpoint.save(
                self._folder, self._serial, model=self._model, optimizers=self._optimizers, amp=self._amp, extra=extra, keep=None
            ).path
        except CheckpointError as error:
            if not self._goods:
                raise
            warnings.warn(f"Recovery: no new good state, and the last one stays: {error}", stacklevel=3)
            self._tried = step
            return
        self._serial += 1
        self._goods.append(_Good(path, step, self._cursor))
        if step > self._furthest + 1:
            self._tries = 0
        for old in self._goods[:-2]:
            self._remove(old)
        self._goods = self._goods[-2:]

    def _unsaved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that are in no state dict."""
        saved = self._inner.state_dict()
        return ((name, buffer) for name, buffer in self._inner.named_buffers() if name not in saved)

    def _remove(self, good: _Good) -> None:
        """Delete a state, by a rename first, so that nothing that has a checkpoint's name is half of one."""
        if self._ranks.rank == 0:
            doomed = good.path.with_name(f".{good.path.name}.deleted")
            with contextlib.suppress(OSError):
                good.path.rename(doomed)
                shutil.rmtree(doomed)

    # --- going back -------------------------------------------------------------------------------------------

    def _go_back(self, symptom: str, first: int) -> None:
        if self._suspect is not None:  # another step, before that one came again
            self._log(self._suspect, Verdict("unknown", "it diverged again before that step"), "none")
            self._suspect = None
        if self._tries >= self._attempts:
            self._give_up(symptom, first)
        goods = [good for good in self._goods if good.step < first] or self._goods[:1]
        if not goods:
            raise CheckpointError(f"Recovery: step {first} diverged ({symptom}), and there is no good state to go back to")
        earlier = self._accidents.get(first, 0)
        good = goods[max(0, len(goods) - 1 - earlier)]
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self._inner.zero_grad()
        self._load(good)
        self._tries += 1
        self._furthest = max(self._furthest, first, self.step)
        for other in self._goods:
            if other.step > good.step:
                self._remove(other)
        self._goods = [other for other in self._goods if other.step <= good.step]
        self._line.back_to(good.step)
        self._skips, self._losses, self._results = [], [], []
        self._suspect = _Suspect(first, good.step, symptom)

    def _give_up(self, symptom: str, first: int) -> None:
        told = "; ".join(f"step {one.step}: {one.symptom}: {one.action}" for one in self.returns[-self._attempts :])
        raise DivergedError(
            f"Recovery: step {first} diverged ({symptom}), and {self._attempts} returns without a new good state did not help: {told}. "
            f"{self._folder / LOG} has the evidence. Look at the data and the learning rate; attempts= allows more."
        )

    def _load(self, good: _Good) -> None:
        """Have everything as it was in a good state, or, where that fails or is interrupted, as it is now."""
        before = {name: copy.deepcopy(thing.state_dict()) for name, thing in self._also.items()}
        here = self._cursor

        def accept(extra: Any) -> None:
            try:
                for name, thing in self._also.items():
                    thing.load_state_dict(extra["also"][name])
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{name} of also= does not take its state: {sentence(error)}") from error
            self._extra = extra
            self._cursor = max(good.cursor, self._base)

        try:
            checkpoint.load(good.path, model=self._model, optimizers=self._optimizers, amp=self._amp, accept=accept)
        except BaseException:
            for name, thing in self._also.items():
                thing.load_state_dict(before[name])
            self._cursor = here
            raise
        with torch.no_grad():
            for name, buffer in self._unsaved_buffers():
                buffer.copy_(self._extra["buffers"][name])
        set_generators({**generators(self._amp), **self._extra["generators"]})

    def _decide(self, suspect: _Suspect) -> None:
        """Find out why a step diverged, now that its weights are good, and see to it."""
        moments = [one.moment for one in self._kept if one.step == suspect.step]
        verdict = self._agree(suspect, moments)
        if verdict.cause == "transient" and self._accidents.get(suspect.step, 0) > len(self._goods):
            verdict = dataclasses.replace(verdict, cause="batch", evidence=f"{verdict.evidence}; but it diverged each time")
        action = "the same batches again"
        if verdict.plan is not None:
            plan = dataclasses.replace(verdict.plan, compile=self._amp.plan.compile)
            try:
                self._amp.change(plan)
                action = f"the plan is {plan} now"
            except (PlanError, StateError) as error:
                verdict = dataclasses.replace(
                    verdict, cause="batch", evidence=f"{verdict.evidence}; the plan cannot be changed here: {sentence(error)}"
                )
        if verdict.cause == "batch":
            self._passed.add(suspect.step)
            action = "the step's batch is passed over" if len(moments) < 2 else "the step's batches are passed over"
        elif verdict.cause == "transient":
            self._accidents[suspect.step] = self._accidents.get(suspect.step, 0) + 1
        self._suspect = None
        self._log(suspect, verdict, action)

    def _agree(self, suspect: _Suspect, moments: Sequence[Moment]) -> Verdict:
        """The verdict of all ranks on their batches: a bad one anywhere is passed over by all."""

        def look() -> Verdict:
            return diagnose(self._amp, self._inner, self._loss, moments, self._line.is_normal)

        verdicts = self._ranks.every(look)
        for cause in ("batch", "format", "loss scale"):
            found = [(rank, one) for rank, one in enumerate(verdicts) if one.cause == cause]
            if found:
                rank, one = found[0]
                where = f"on rank {rank}: " if self._ranks.size > 1 else ""
                return dataclasses.replace(one, evidence=f"{where}{one.evidence}", plan=_joined([v for _, v in found]))
        return verdicts[0]

    # --- what was done ----------------------------------------------------------------------------------------

    def _log(self, suspect: _Suspect, verdict: Verdict, action: str) -> None:
        one = Return(
            suspect.step, suspect.to_step, suspect.symptom, verdict.cause, verdict.evidence, action, str(self._amp.plan)
        )
        self.returns += (one,)
        if self._ranks.rank == 0:
            warnings.warn(
                f"Recovery: step {one.step} diverged ({one.symptom}); back to step {one.to_step}. Cause: {one.cause} "
                f"({one.evidence}). {one.action[:1].upper()}{one.action[1:]}.",
                stacklevel=4,
            )
            try:
                with (self._folder / LOG).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(one.to_dict()) + "\n")
            except OSError as error:
                warnings.warn(f"Recovery: {LOG} was not written: {error}", stacklevel=4)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": "recovery",
            "steps": self.step + 1,
            "first_plan": str(self._first_plan),
            "plan": str(self._amp.plan),
            "returns": [one.to_dict() for one in self.returns],
            "passed_over": sorted(self._passed),
        }

    def table(self) -> RenderableType:
        """What was done, for ``rich.print``."""
        from castwise.report.show import table

        return table(self.to_dict())

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``recovery.json`` into a folder; returns its path."""
        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        path = where / "recovery.json"
        path.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path


def _joined(verdicts: Sequence[Verdict]) -> Plan | None:
    """One plan with the regions of all, and the smallest loss scale."""
    plans = [verdict.plan for verdict in verdicts if verdict.plan is not None]
    if not plans:
        return None
    first, *others = plans
    for other in others:
        more = tuple(region for region in other.regions if region not in first.regions)
        rules = tuple(rule for rule in other.ops if rule not in first.ops)
        first = dataclasses.replace(first, regions=(*first.regions, *more), ops=(*first.ops, *rules))
        if first.loss_scale is not None and other.loss_scale is not None and other.loss_scale.init < first.loss_scale.init:
            first = dataclasses.replace(first, loss_scale=other.loss_scale)
    return first
