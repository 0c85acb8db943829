"""Where a training diverges, go back to the last good state, see to what did it, and go on.

Good states are checkpoints (:mod:`castwise.checkpoint`), each whole or not there. The batches since then are kept, with the
random states that they were handed out at, so that the way back is the way that was gone, but for what is changed: a batch is
passed over, a region or the whole plan gets a safer format, a loss scale is lowered, or nothing, where the weights had been
damaged. How often is bounded, and each time is logged with its evidence.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.checkpoint.saving import as_list
from castwise.errors import CheckpointError, DivergedError, PlanError, StateError, check_count, sentence
from castwise.monitor.diagnosis import Verdict, diagnose
from castwise.monitor.good_states import Good, GoodStates
from castwise.monitor.losses import LossLine
from castwise.monitor.moments import Moment, set_generators
from castwise.monitor.passes import Loss, mean_loss
from castwise.monitor.recorder import check_prepared
from castwise.monitor.rewind import Rewind
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
class _Suspect:
    step: int
    to_step: int
    symptom: str
    limit: float


class Recovery:
    """Takes a training that diverges back to its last good state, and past what made it diverge.

    .. code-block:: python

        recovery = castwise.Recovery(amp, model, optimizer, loss, "runs/a/good", also={"scheduler": scheduler})
        for batch in recovery.batches(loader):
            amp.backward(loss(model, batch))
            amp.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
            scheduler.step()

    A step has diverged where its loss is not finite; where three in a row are skipped that no loss scale would save; and where
    the loss is far above what it was, at once or five times in a row (``castwise.monitor.losses`` has the line). Then weights, optimizer, loss
    scale, random generators and ``also`` become what they were, ``batches`` hands out the same batches again, and before
    the one that diverged comes again a copy of the model finds out why.

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
        self._states = GoodStates(
            amp, model, self._inner, as_list(optimizers), dict(also or {}), Path(folder)
        )
        self._amp, self._model, self._loss = amp, model, loss
        self._folder, self._every, self._attempts, self._spikes = Path(folder), every, attempts, spikes
        self._data = Rewind(keep_bytes)
        self._ranks = Ranks()
        self._line = LossLine()
        self._accidents: dict[int, int] = {}
        """By step, how often its divergence was called an accident."""
        self._losses: list[tuple[str, Tensor]] = []
        self._results: list[StepResult] = []
        self._skips: list[int] = []
        """Steps skipped in a row just now."""
        self._tries = 0
        self._furthest = -1
        """The last step that has diverged."""
        self._tried = -1
        """The step before which a good state could not be saved."""
        self._suspect: _Suspect | None = None
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
        self._data.clear()
        self._losses, self._results = [], []

    # --- what a training tells --------------------------------------------------------------------------------

    def _on_loss(self, loss: Tensor, name: str) -> None:
        self._losses.append((name, loss.detach().clone()))

    def _on_step(self, _: Sequence[Optimizer], result: StepResult) -> None:
        self._results.append(result)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, and after a return those since the good state again; then the loader goes on where it was.

        Call it once for each epoch: what is to be gone back to may lie in an earlier one.

        Raises:
            DivergedError: The training has diverged, and going back did not help ``attempts`` times.
            CheckpointError: There is no good state to go back to, or it cannot be read.
        """
        source, data = iter(loader), self._data
        while True:
            if self._results:
                self._end_of_step()
            data.pass_over()
            if not self._losses and (not self._states.all or self._is_due()):
                self._save()
            if self._suspect is not None and self._suspect.step <= data.step:
                self._decide(self._suspect)
                data.pass_over()
            moment = data.again()
            if moment is None:
                try:
                    batch = next(source)
                except StopIteration:
                    return
                moment = Moment.of(batch, self._amp)
                data.keep(moment, min(good.cursor for good in self._states.all))
            else:
                set_generators(moment.random)
            self.step = data.step
            data.cursor += 1
            yield moment.batch

    # --- is it well? ------------------------------------------------------------------------------------------

    def _end_of_step(self) -> None:
        value, skipped = self._seen()
        step = self.step
        self._data.end_step(step)
        symptom, first = self._symptom(step, value, skipped)
        if symptom:
            self._go_back(symptom, first)
        self._losses, self._results = [], []

    def _seen(self) -> tuple[float, bool]:
        """The step's loss, and whether it was skipped, as all ranks see it. The host waits for the device."""
        value = mean_loss(self._losses)
        skipped = any(result.skipped for result in self._results)
        if self._ranks.size > 1:
            kind = self._amp.device_type
            both = torch.tensor(
                [value, float(skipped)], dtype=torch.float32 if kind == "mps" else torch.float64, device=kind
            )
            torch.distributed.all_reduce(both)
            value, skipped = float(both[0]) / self._ranks.size, bool(both[1] > 0)
        return value, skipped

    def _symptom(self, step: int, value: float, skipped: bool) -> tuple[str, int]:
        """What is wrong with a step, in a clause, and the step that it began with."""
        self._skips = (
            [*(one for one in self._skips if one != step), step] if skipped and self._is_final() else []
        )
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
        step = self._data.step
        quiet = not self._line.suspects and not self._skips
        return (
            quiet
            and self._suspect is None
            and step - max(self._states.all[-1].step, self._tried) >= self._every
        )

    def _save(self) -> None:
        if not all(bool(torch.isfinite(p).all()) for p in self._inner.parameters()):
            if not self._states.all:
                raise StateError(
                    "Recovery: weights are not finite at the start, so that there is no good state to go back to"
                )
            self._go_back("weights are not finite", self.step)
            return
        step = self._data.step
        try:
            self._states.add(step, self._data.cursor)
        except CheckpointError as error:
            if not self._states.all:
                raise
            warnings.warn(f"Recovery: no new good state, and the last one stays: {error}", stacklevel=3)
            self._tried = step
            return
        if step > self._furthest + 1:
            self._tries = 0

    # --- going back -------------------------------------------------------------------------------------------

    def _go_back(self, symptom: str, first: int) -> None:
        if self._suspect is not None:  # another step, before that one came again
            self._log(self._suspect, Verdict("unknown", "it diverged again before that step"), "none")
            self._suspect = None
        if self._tries >= self._attempts:
            self._give_up(symptom, first)
        good, limit = self._states.before(first, self._accidents.get(first, 0)), self._line.limit
        self._load(good)
        self._tries += 1
        self._furthest = max(self._furthest, first, self.step)
        self._states.forget_after(good)
        self._line.back_to(good.step)
        self._skips, self._losses, self._results = [], [], []
        self._suspect = _Suspect(first, good.step, symptom, limit)

    def _give_up(self, symptom: str, first: int) -> None:
        told = "; ".join(
            f"step {one.step}: {one.symptom}: {one.action}" for one in self.returns[-self._attempts :]
        )
        raise DivergedError(
            f"Recovery: step {first} diverged ({symptom}), and {self._attempts} returns without a new good state did not help: {told}. "
            f"{self._folder / LOG} has the evidence. Look at the data and the learning rate; attempts= allows more."
        )

    def _load(self, good: Good) -> None:
        """Have everything as it was in a good state, or, where that fails or is interrupted, as it is now."""
        here = self._data.cursor
        try:
            self._data.cursor = max(good.cursor, self._data.base)
            self._states.load(good)
        except BaseException:
            self._data.cursor = here
            raise

    def _decide(self, suspect: _Suspect) -> None:
        """Find out why a step diverged, now that its weights are good, and see to it."""
        moments = self._data.moments_of(suspect.step)
        verdict = self._agree(suspect, moments)
        if verdict.cause == "transient" and self._accidents.get(suspect.step, 0) > len(self._states.all):
            verdict = dataclasses.replace(
                verdict, cause="batch", evidence=f"{verdict.evidence}; but it diverged each time"
            )
        action = "the same batches again"
        if verdict.plan is not None:
            plan = dataclasses.replace(verdict.plan, compile=self._amp.plan.compile)
            try:
                self._amp.change(plan)
                action = f"the plan is {plan} now"
            except (PlanError, StateError) as error:
                verdict = dataclasses.replace(
                    verdict,
                    cause="batch",
                    evidence=f"{verdict.evidence}; the plan cannot be changed here: {sentence(error)}",
                )
        if verdict.cause == "batch":
            self._data.passed.add(suspect.step)
            action = (
                "the step's batch is passed over"
                if len(moments) < 2
                else "the step's batches are passed over"
            )
        elif verdict.cause == "transient":
            self._accidents[suspect.step] = self._accidents.get(suspect.step, 0) + 1
        self._suspect = None
        self._log(suspect, verdict, action)

    def _agree(self, suspect: _Suspect, moments: Sequence[Moment]) -> Verdict:
        """The verdict of all ranks on their batches: a bad one anywhere is passed over by all."""

        def look() -> Verdict:
            return diagnose(self._amp, self._inner, self._loss, moments, suspect.limit)

        verdicts = self._ranks.every(look)
        for cause in ("batch", "format", "loss scale"):
            found = [(rank, one) for rank, one in enumerate(verdicts) if one.cause == cause]
            if found:
                rank, one = found[0]
                where = f"on rank {rank}: " if self._ranks.size > 1 else ""
                return dataclasses.replace(
                    one, evidence=f"{where}{one.evidence}", plan=_joined([v for _, v in found])
                )
        return verdicts[0]

    # --- what was done ----------------------------------------------------------------------------------------

    def _log(self, suspect: _Suspect, verdict: Verdict, action: str) -> None:
        one = Return(
            suspect.step,
            suspect.to_step,
            suspect.symptom,
            verdict.cause,
            verdict.evidence,
            action,
            str(self._amp.plan),
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
            "version": 1,
            "steps": self.step + 1,
            "first_plan": str(self._first_plan),
            "plan": str(self._amp.plan),
            "returns": [one.to_dict() for one in self.returns],
            "passed_over": sorted(self._data.passed),
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
        if (
            first.loss_scale is not None
            and other.loss_scale is not None
            and other.loss_scale.init < first.loss_scale.init
        ):
            first = dataclasses.replace(first, loss_scale=other.loss_scale)
    return first
