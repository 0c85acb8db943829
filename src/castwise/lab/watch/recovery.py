"""Where a training diverges, go back to the last good state, see to what did it, and go on.

Good states are checkpoints (:mod:`castwise.checkpoint`), each whole or not there. The batches since then are kept, with the
random states that they were handed out at, so that the way back is the way that was gone, but for what is changed: a batch is
passed over, a region or the whole plan gets a safer format, a loss scale is lowered, or nothing, where the weights had been
damaged. How often is bounded, and each time is logged with its evidence.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.optim import Optimizer

from castwise.core.checkpoint.saving import as_list
from castwise.core.checkpoint.storage import local_of
from castwise.core.files import write_whole
from castwise.core.masters import OfThisProcess
from castwise.core.plans.plan import Plan
from castwise.core.plans.words import in_words
from castwise.core.session.amp import Amp, SessionView
from castwise.errors import CheckpointError, DivergedError, PlanError, StateError, check_count, sentence
from castwise.lab.result import Result
from castwise.lab.watch.diagnosis import Diagnosis, diagnose
from castwise.lab.watch.good_states import Good, GoodStates
from castwise.lab.watch.moments import Moment, set_generators
from castwise.lab.watch.passes import Loss
from castwise.lab.watch.recorder import check_prepared
from castwise.lab.watch.rewind import Rewind
from castwise.lab.watch.rollback import Rollback, gave_up
from castwise.lab.watch.symptoms import Symptoms, summed

_NO_MORE = object()


@dataclass(frozen=True)
class _Suspect:
    step: int
    to_step: int
    symptom: str
    limit: float


class Recovery(OfThisProcess, Result):
    """Takes a training that diverges back to its last good state, and past what made it diverge.

    .. code-block:: python

        recovery = castwise.Recovery(amp, model, optimizer, loss, "runs/a/good", also={"scheduler": scheduler})
        for batch in recovery.batches(loader):
            amp.backward(loss(model, batch))
            amp.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
            scheduler.step()

    A step has diverged where its loss is not finite; where three in a row are skipped that no loss scale would save; and where
    the loss is far above what it was, at once or five times in a row (``castwise.lab.watch.losses`` has the line). Then weights, optimizer, loss
    scale, random generators and ``also`` become what they were, ``batches`` hands out the same batches again, and before
    the one that diverged comes again a copy of the model finds out why.

    At each step the host waits for the loss. Where the session has several ranks every rank makes the same recovery and all go
    back together; a step's loss is the mean over ranks. Under FSDP2 a good state is each rank's own shards; to find out why a
    step diverged each rank puts the whole model together once, and needs its memory for as long.

    Args:
        amp: The session, with ``nonfinite="skip"``, which is its default.
        model: What it has prepared; DistributedDataParallel, FSDP2 and ``torch.compile`` around it are seen through.
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
        StateError: A model that this session has not prepared, a stage of a pipeline, or one with weights that were cut by hand.
    """

    kind: ClassVar[str] = "recovery"
    returns: tuple[Rollback, ...]
    """What was done so far."""
    step: int
    """Number of the batch that was handed out last, in the order of the data; it goes back too."""

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
        given, things = as_list(optimizers), dict(also or {})
        self._states = GoodStates(amp, model, self._inner, given, things, Path(folder))
        self._amp, self._model, self._loss = amp, model, loss
        self._folder, self._every, self._attempts = Path(folder), every, attempts
        self._data = Rewind(keep_bytes)
        self._ranks = SessionView(amp).ranks
        self._accidents: dict[int, int] = {}
        """By step, how often its divergence was called an accident."""
        self._tries = 0
        self._furthest = -1
        """The last step that has diverged."""
        self._tried = -1
        """The step before which a good state could not be saved."""
        self._suspect: _Suspect | None = None
        self._first_plan = amp.plan
        self.returns, self.step = (), -1
        self._closed = self._begins = False
        self._symptoms = Symptoms(amp, self._ranks, spikes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Watch the session no longer. Good states stay on disk."""
        self._closed = True
        self._symptoms.end()
        self._symptoms.clear()
        self._data.clear()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, and after a return those since the good state again; then the loader goes on where it was.

        Call it once for each epoch. The first thing that it does is to save a good state, and nothing goes back to before it: what
        the loop does between two epochs, such as a step of a scheduler, stays done.

        Raises:
            DivergedError: The training has diverged, and going back did not help ``attempts`` times.
            CheckpointError: There is no good state to go back to, or it cannot be read.
            StateError: This recovery was closed, or its session was; or steps are made, and no loss was seen.
        """
        if self._closed:
            raise StateError("Recovery.batches: this recovery was closed; make a new one")
        check_prepared("Recovery.batches", self._amp, self._inner)
        self._begins = True
        source = iter(loader)
        while (moment := self._next(source)) is not None:
            yield moment.batch

    def _next(self, source: Iterator[Any]) -> Moment | None:
        """The next batch: one of those that are kept, or a new one; None where there is no other."""
        data = self._data
        if self._closed:
            batch = next(source, _NO_MORE)
            return None if batch is _NO_MORE else Moment(batch, {}, ())
        if self._symptoms.stepped:
            self._end_of_step()
        if self._begins and self._symptoms.between_steps:
            self._begin()
        data.pass_over()
        if self._symptoms.between_steps and (not self._states.all or self._is_due()):
            self._save_state()
        if self._suspect is not None and self._suspect.step <= data.step:
            self._decide(self._suspect)
            data.pass_over()
        moment = data.again()
        if moment is None:
            batch = next(source, _NO_MORE)
            if batch is _NO_MORE:
                return None
            moment = Moment.of(batch, self._amp)
            data.keep(moment, min(good.cursor for good in self._states.all))
        else:
            set_generators(moment.random)
        self.step = data.step
        data.cursor += 1
        return moment

    def _begin(self) -> None:
        """A loader begins: what is left of the one before is over, and its good states with it."""
        self._begins = False
        if (
            self._suspect is not None
        ):  # in the last steps before the loop left that loader, or before its step came again
            found = Diagnosis("unknown", "the loop left the data loader before it reached that step again")
            self._log(
                self._suspect, found, "the epoch ends at its last good state, and the next one begins there"
            )
            self._suspect = None
        self._data.clear()
        if self._states.all:
            self._save_state()
            self._states.forget_before(self._states.all[-1])

    def _end_of_step(self) -> None:
        self._data.end_step(self.step)
        symptom, first = self._symptoms.check(self.step)
        if symptom:
            self._go_back(symptom, first)
        self._symptoms.clear()

    # --- good states ------------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        step = self._data.step
        return (
            self._symptoms.quiet
            and self._suspect is None
            and step - max(self._states.all[-1].step, self._tried) >= self._every
        )

    def _save_state(self) -> None:
        sound = all(bool(torch.isfinite(local_of(p)).all()) for p in self._inner.parameters())
        if any(summed(self._amp, self._ranks, float(not sound))):
            if not self._states.all:
                raise StateError(
                    "Recovery: weights are not finite at the start, so there is no good state to go back to"
                )
            self._go_back("weights are not finite", self.step)
            return
        step = self._data.step
        try:
            self._states.add(step, self._data.cursor)
        except CheckpointError as error:
            if not self._states.all:
                raise
            warnings.warn(
                f"Recovery: the new good state could not be kept, and the last one remains: {error}",
                stacklevel=3,
            )
            self._tried = step
            return
        if step > self._furthest + 1:
            self._tries = 0

    # --- going back -------------------------------------------------------------------------------------------

    def _go_back(self, symptom: str, first: int) -> None:
        if self._suspect is not None:  # another step, before that one came again
            self._log(self._suspect, Diagnosis("unknown", "it diverged again before that step"), "none")
            self._suspect = None
        if self._tries >= self._attempts:
            raise DivergedError(gave_up(first, symptom, self.returns[-self._attempts :], self._folder))
        good, limit = self._states.before(first, self._accidents.get(first, 0)), self._symptoms.limit
        self._load(good)
        self._tries += 1
        self._furthest = max(self._furthest, first, self.step)
        self._states.forget_after(good)
        self._symptoms.back_to(good.step)
        self._suspect = _Suspect(first, good.step, symptom, limit)

    def _load(self, good: Good) -> None:
        """Have everything as it was in a good state, or, where that fails or is interrupted, as it is now."""
        data = self._data
        here = data.cursor
        # a rank may have let go of more, and all go one way
        kept = self._ranks.gather((data.base, data.changed()))
        try:
            data.cursor = max(good.cursor, *(base for base, _ in kept))
            self._states.load(good)
        except BaseException:
            data.cursor = here
            raise
        data.spoilt = set().union(*(steps for _, steps in kept))

    def _decide(self, suspect: _Suspect) -> None:
        """Find out why a step diverged, now that its weights are good, and see to it."""
        moments, spoilt = self._data.moments_of(suspect.step), self._data.spoilt
        if suspect.step in spoilt:
            found = Diagnosis(
                "batch",
                "its batch has been overwritten since the loader returned it, so the step cannot be repeated",
            )
        else:
            found = self._agree(suspect, moments)
        if found.cause == "transient" and self._accidents.get(suspect.step, 0) > len(self._states.all):
            found = dataclasses.replace(
                found, cause="batch", evidence=f"{found.evidence}; but it diverged each time"
            )
        action = "the same batches again"
        if found.plan is not None:
            plan = dataclasses.replace(found.plan, compile=self._amp.plan.compile)
            try:
                self._amp.change(plan)
                action = f"the plan is {plan} now"
            except (PlanError, StateError) as error:
                found = dataclasses.replace(
                    found,
                    cause="batch",
                    evidence=f"{found.evidence}; the plan cannot be changed here: {sentence(error)}",
                )
        if found.cause == "batch":
            self._data.passed.add(suspect.step)
            action = "the step's batch is skipped" if len(moments) < 2 else "the step's batches are skipped"
        elif found.cause == "transient":
            self._accidents[suspect.step] = self._accidents.get(suspect.step, 0) + 1
        lost = sum(step >= suspect.to_step for step in spoilt - {suspect.step})
        if lost:
            action += (
                f"; {lost} other step{'s' * (lost > 1)} since the good state {'are' if lost > 1 else 'is'} not repeated, "
                f"since the loop has overwritten the batches"
            )
        self._suspect = None
        self._log(suspect, found, action)

    def _agree(self, suspect: _Suspect, moments: Sequence[Moment]) -> Diagnosis:
        """One diagnosis for all ranks: a bad batch on any rank is skipped by all."""
        diagnoses = diagnose(self._amp, self._inner, self._loss, moments, suspect.limit, self._ranks)
        for cause in ("batch", "format", "loss scale"):
            found = [(rank, one) for rank, one in enumerate(diagnoses) if one.cause == cause]
            if found:
                rank, one = found[0]
                where = f"on rank {rank}: " if self._ranks.size > 1 else ""
                return dataclasses.replace(
                    one, evidence=f"{where}{one.evidence}", plan=_joined([v for _, v in found])
                )
        return diagnoses[0]

    # --- what was done ----------------------------------------------------------------------------------------

    def _log(self, suspect: _Suspect, found: Diagnosis, action: str) -> None:
        one = Rollback(
            suspect.step,
            suspect.to_step,
            suspect.symptom,
            found.cause,
            found.evidence,
            action,
            str(self._amp.plan),
        )
        self.returns += (one,)
        if self._ranks.rank == 0:
            one.tell(self._folder)

    def _fields(self) -> dict[str, Any]:
        return {
            "steps": self.step + 1,
            "first_plan": str(self._first_plan),
            "plan": str(self._amp.plan),
            "words": in_words(self._amp.plan),
            "returns": [one.to_dict() for one in self.returns],
            "passed_over": sorted(self._data.passed),
            "restored_buffers": self._amp.restored_buffers,
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``recovery.json`` into a folder; returns its path."""
        path = Path(folder) / "recovery.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.to_json() + "\n")
        return path


def _joined(diagnoses: Sequence[Diagnosis]) -> Plan | None:
    """One plan with the regions of all, and the smallest loss scale."""
    plans = [found.plan for found in diagnoses if found.plan is not None]
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
