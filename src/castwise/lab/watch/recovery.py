"""Return a diverged training to its last good state, remove the cause of the divergence, and continue.

Good states are checkpoints (:mod:`castwise.checkpoint`), each of which is complete or absent. The batches since the last good
states are kept, with the states of the random generators. The training can thus repeat the same steps with one change. The
change removes the cause: the batch is skipped, a module or the whole plan gets a safer format, or the loss scale is lowered. If
only the weights were damaged, nothing is changed. Each return is logged with its evidence. If returns do not help and the
weights are finite, the recovery stops and the training continues.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
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
from castwise.core.plans.words import in_words
from castwise.core.session.amp import Amp, SessionView
from castwise.errors import CheckpointError, DivergedError, PlanError, StateError, check_count, sentence
from castwise.lab.result import Result
from castwise.lab.watch.diagnosis import Diagnosis, agreed, diagnose, in_data
from castwise.lab.watch.good_states import Good, GoodStates
from castwise.lab.watch.moments import Moment, set_generators
from castwise.lab.watch.passes import Loss
from castwise.lab.watch.progress import Progress
from castwise.lab.watch.recorder import check_prepared
from castwise.lab.watch.rewind import Rewind
from castwise.lab.watch.rollback import Rollback, gave_up, stopped
from castwise.lab.watch.symptoms import Symptoms, summed

RESTORED = 10
"""Largest number of steps in a row with non-finite batches after which the loss scale is still restored."""
_NO_MORE = object()


@dataclass(frozen=True)
class _Suspect:
    step: int
    to_step: int
    symptom: str
    limit: float


class Recovery(OfThisProcess, Result):
    """Returns a diverged training run to its last good state and removes the cause of the divergence.

    Use it around the batches of a training loop. It saves the state of the training (a good state) at regular
    intervals and checks each step. If the training diverges, it restores the last good state (this is a return).
    The loop then repeats the steps since that state, with one change that removes the cause.

    .. code-block:: python

        recovery = castwise.Recovery(amp, model, optimizer, loss, "runs/a/good", also={"scheduler": scheduler})
        for batch in recovery.batches(loader):
            amp.backward(loss(model, batch))
            amp.step(optimizer, max_norm=1.0)
            optimizer.zero_grad()
            scheduler.step()

    The training has diverged in any of three cases:

    - The loss of a step is not finite.
    - Three steps in a row are skipped, and no smaller loss scale would prevent this.
    - The loss is far above earlier losses. One very high loss is enough, or five high losses in a row.
      ``castwise.lab.watch.losses`` defines the limits.

    Then weights, optimizers, loss scale, random generators and the objects in ``also`` are restored, and ``batches``
    yields the same batches again. Before the diverged step is repeated, its cause is found on a copy of the model.
    The cause is removed by skipping the batch, changing a format, or lowering the loss scale. If only the weights
    were damaged, nothing is changed. If a step was skipped because its batch holds NaN or infinities, no return is
    needed, and only the loss scale is restored.

    The recovery gives up if ``attempts`` returns in a row make no progress, or if more than 24 steps within 2400
    would be skipped. It then restores the last good state and repeats the steps that were skipped since. If losses
    were high but finite, they no longer count as divergence from then on. If losses were not finite, the recovery
    stops. The training then continues with ``nonfinite="skip"`` alone.

    At each step the host waits for the loss. With several ranks, every rank makes the same recovery, and all ranks
    return together. The loss of a step is then the mean over the ranks. Under FSDP2, each rank saves its own shards
    in a good state. To find a cause, each rank gathers the whole model once and needs the memory for it meanwhile.

    Args:
        amp: The :class:`castwise.Amp` that prepared the model, with ``nonfinite="skip"``, its default.
        model: The prepared model. It may be wrapped in DistributedDataParallel, FSDP2 or ``torch.compile``.
        optimizers: The optimizer of the model, or several optimizers.
        loss: A function ``loss(model, batch)`` that computes the loss as the loop does, from a batch that the loader
            yields. It has the form that :func:`castwise.replay` describes.
        folder: A folder for the good states and the log ``recovery.jsonl``. No other recovery may use it.
        also: Further objects to restore, by name, such as schedulers and averages of weights. They need
            ``state_dict`` and ``load_state_dict``.
        every: The number of steps from one good state to the next.
        attempts: The largest number of returns in a row without progress. It is progress if a batch is skipped, if a
            new good state is saved, or if the next divergence is more than five steps later.
        spikes: Whether high finite losses count as divergence. If not, only non-finite values do.
        keep_bytes: The largest total size in bytes of the batches that are kept for repetition. If they would be
            larger, the earliest are discarded. A return then continues with the remaining batches.

    Raises:
        PlanError: A number is below 1, ``amp`` is not a :class:`castwise.Amp`, ``loss`` is not a function, or an
            object in ``also`` has no ``state_dict``.
        StateError: The model was not prepared by ``amp``, is a pipeline stage, or holds weights that your own code has
            split over ranks.
    """

    kind: ClassVar[str] = "recovery"
    returns: tuple[Rollback, ...]
    """All returns to a good state so far, and all skipped steps that needed no return, in order."""
    step: int
    """The number of the last batch that was yielded, in data order. A return to a good state lowers it."""

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
        self._folder, self._every = Path(folder), every
        self._data = Rewind(keep_bytes)
        self._ranks = SessionView(amp).ranks
        self._accidents: dict[int, int] = {}
        """How often the divergence of each step was found to be transient."""
        self._progress = Progress(attempts)
        self._bad_data: list[int] = []
        """The last steps in a row that were skipped because their data was not finite."""
        self._scale: dict[str, Any] | None = None
        """The session's state after the last step that did not diverge; None if the plan has no dynamic loss scale."""
        self._tried = -1
        """The step before which saving a good state last failed."""
        self._suspect: _Suspect | None = None
        self._first_plan = amp.plan
        self.returns, self.step = (), -1
        self._closed = self._stopped = self._begins = False
        self._symptoms = Symptoms(amp, self._ranks, spikes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching the training. Good states stay on disk.

        If the loop is repeating batches, it repeats the rest of them.
        """
        self._closed = True
        self._symptoms.end()
        self._symptoms.clear()
        self._data.forget_past()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, and repeat some of them if the training returns to a good state.

        After a return, the batches since the good state are yielded again, followed by new batches. Call this method
        once per epoch. Each call first saves a good state, and the training never returns to a state before it.
        Changes between two epochs, such as a scheduler's step, are thus kept.

        Args:
            loader: The data loader, or any other iterable of batches.

        Raises:
            DivergedError: Weights are not finite, and ``attempts`` returns did not help.
            CheckpointError: No good state exists, or the good state cannot be read.
            StateError: This recovery or its :class:`castwise.Amp` was closed, or steps are made without a loss.
        """
        if self._closed:
            raise StateError("Recovery.batches: this recovery was closed; make a new one")
        check_prepared("Recovery.batches", self._amp, self._inner)
        self._begins = True
        source = iter(loader)
        while (moment := self._next(source)) is not None:
            yield moment.batch

    def _next(self, source: Iterator[Any]) -> Moment | None:
        """Return the next batch, kept or new; None at the end of the loader."""
        data = self._data
        if self._symptoms.stepped:
            self._end_of_step()
        if self._closed or self._stopped:
            return self._next_unwatched(source)
        if self._begins and self._symptoms.between_steps:
            self._begin()
        data.pass_over()
        if self._symptoms.between_steps and (not self._states.all or self._is_due()):
            self._save_state()
        if self._suspect is not None and self._suspect.step <= data.step:
            self._decide(self._suspect)
            data.pass_over()
        return self._drawn(source, watched=True)

    def _next_unwatched(self, source: Iterator[Any]) -> Moment | None:
        """Return the next batch after the recovery has stopped: first the kept batches to repeat, then those of the loader."""
        data = self._data
        if self._begins:
            self._begins = False
            data.clear()
        data.pass_over()
        data.forget_past()
        return self._drawn(source, watched=False)

    def _drawn(self, source: Iterator[Any], *, watched: bool) -> Moment | None:
        """Return the kept batch at the cursor and restore its random states, or draw a new batch.

        A new batch is kept if it is ``watched``. At the end of the loader, None is returned.
        """
        data = self._data
        moment = data.again()
        if moment is not None:
            set_generators(moment.random)
        elif (batch := next(source, _NO_MORE)) is _NO_MORE:
            return None
        elif watched:
            moment = Moment.of(batch, self._amp)
            data.keep(moment, min(good.cursor for good in self._states.all))
        else:
            moment = Moment(batch, {}, ())
        if watched or self._stopped or moment.random:
            self.step = data.step
        data.cursor += 1
        return moment

    def _begin(self) -> None:
        """Start a loader. The batches and good states of the previous loader are discarded."""
        self._begins = False
        if self._suspect is not None:  # a step of the previous loader diverged and was not repeated
            found = Diagnosis("unknown", "the loop left the data loader before it repeated that step")
            self._log(self._suspect, found, "the next epoch starts from the last good state of this epoch")
            self._suspect = None
        self._data.clear()
        if self._states.all:
            self._save_state()
            self._states.forget_before(self._states.all[-1])

    def _end_of_step(self) -> None:
        self._data.end_step(self.step)
        if not self._stopped:
            symptom, first = self._symptoms.check(self.step)
            if not symptom:
                self._bad_data.clear()
                scale = self._amp.plan.loss_scale
                self._scale = self._amp.state_dict() if scale is not None and scale.dynamic else None
            elif not self._needs_no_return(symptom):
                self._go_back(symptom, first)
        self._symptoms.clear()

    def _needs_no_return(self, symptom: str) -> bool:
        """Whether a skipped step needs no return because its batch is not finite. If so, restore the loss scale.

        The weights are unchanged in this case.
        """
        step, data = self.step, self._data
        if not self._symptoms.unmoved:
            return False
        found = in_data(data.moments_of(step), self._before(self._states.all[-1].step, step)[1], self._ranks)
        if not found or not self._is_finite():
            return False
        data.passed.add(step)
        self._bad_data.append(step)
        if self._scale is not None and len(self._bad_data) <= RESTORED:
            self._amp.load_state_dict(self._scale)
        self._log(_Suspect(step, step + 1, symptom, math.inf), agreed(found), "the step was skipped")
        return True

    def _is_finite(self) -> bool:
        """Whether all weights are finite on all ranks, which must call this together."""
        sound = all(bool(torch.isfinite(local_of(p)).all()) for p in self._inner.parameters())
        return not any(summed(self._amp, self._ranks, float(not sound)))

    # --- good states ------------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        step = self._data.step
        return (
            self._symptoms.quiet
            and self._suspect is None
            and step - max(self._states.all[-1].step, self._tried) >= self._every
        )

    def _save_state(self) -> None:
        if not self._is_finite():
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
                f"Recovery: the new good state could not be saved; the previous good state is kept: {error}",
                stacklevel=3,
            )
            self._tried = step
            return
        self._progress.confirmed(step)

    # --- going back -------------------------------------------------------------------------------------------

    def _go_back(self, symptom: str, first: int) -> None:
        if self._suspect is not None:  # another step diverged before that one was repeated
            self._log(
                self._suspect,
                Diagnosis("unknown", "training diverged again before that step was repeated"),
                "no change was made",
            )
            self._suspect = None
            self._progress.failed += 1
        self._progress.diverged(first, self.step)
        if why := self._progress.stuck(first):
            self._stop(symptom, first, why)
            return
        self._data.passed -= self._progress.updates  # skipping these steps did not help
        earlier = max(self._accidents.get(first, 0), self._progress.failed)
        good, limit = self._states.before(first, earlier), self._symptoms.limit
        self._return_to(good)
        self._suspect = _Suspect(first, good.step, symptom, limit)

    def _stop(self, symptom: str, first: int, why: str) -> None:
        """Restore the last good state, repeat the skipped batches, and continue as if there were no recovery.

        Raises:
            DivergedError: Weights are not finite.
        """
        if not self._is_finite():
            tried = tuple(one for one in self.returns if not one.needed_no_return)
            raise DivergedError(gave_up(first, symptom, tried[-self._progress.attempts :], self._folder))
        good, high = self._states.before(min([first, *self._progress.updates]), 0), self._symptoms.high
        again = {step for step in self._progress.skipped if step >= good.step}
        self._data.passed -= again
        self._return_to(good)
        if high:
            self._symptoms.spikes = False
        else:
            self._stopped = True
        self._log(
            _Suspect(first, good.step, symptom, math.inf),
            Diagnosis("unknown", why),
            stopped(len(again), high),
        )

    def _return_to(self, good: Good) -> None:
        self._load(good)
        self._states.forget_after(good)
        self._symptoms.back_to(good.step)

    def _load(self, good: Good) -> None:
        """Restore a good state. If that fails or is interrupted, everything is unchanged."""
        data = self._data
        here = data.cursor
        # a rank may have discarded more batches than others, and all ranks must continue at the same batch
        kept = self._ranks.gather((data.base, data.changed()))
        try:
            data.cursor = max(good.cursor, *(base for base, _ in kept))
            self._states.load(good)
        except BaseException:
            data.cursor = here
            raise
        self._scale = None
        data.spoilt = set().union(*(steps for _, steps in kept))

    def _decide(self, suspect: _Suspect) -> None:
        """Find the cause of a divergence after the good weights were restored, and remove the cause."""
        data, spoilt = self._data, self._data.spoilt
        moments = data.moments_of(suspect.step)
        last, before = self._before(suspect.to_step, suspect.step)
        if suspect.step in spoilt:
            found = Diagnosis(
                "batch",
                "the step's batch was overwritten after the loader returned it, so the step cannot be repeated",
            )
        else:
            found = agreed(
                diagnose(self._amp, self._inner, self._loss, moments, before, suspect.limit, self._ranks)
            )
        if found.cause == "transient" and self._accidents.get(suspect.step, 0) > len(self._states.all):
            found = dataclasses.replace(
                found, cause="batch", evidence=f"{found.evidence}; but each repetition of the step diverged"
            )
        action = "the same batches are repeated"
        if found.plan is not None:
            plan = dataclasses.replace(found.plan, compile=self._amp.plan.compile)
            try:
                self._amp.change(plan)
                action = f"training continues under {plan}"
            except (PlanError, StateError) as error:
                found = dataclasses.replace(
                    found,
                    cause="batch",
                    evidence=f"{found.evidence}; the plan cannot be changed here: {sentence(error)}",
                )
        if found.cause == "batch":
            self._skip(suspect.step)
            action = "the step's batch is skipped" if len(moments) < 2 else "the step's batches are skipped"
        else:
            self._progress.failed += 1
        if found.cause == "update":
            assert last is not None
            self._skip(last)
            self._progress.updates.add(last)
            self._return_to(self._states.all[-1])
            action = f"step {last} is skipped"
        elif found.cause == "transient":
            self._accidents[suspect.step] = self._accidents.get(suspect.step, 0) + 1
        lost = sum(step >= suspect.to_step for step in spoilt - {suspect.step})
        if lost:
            action += (
                f"; {lost} other step{'s' * (lost > 1)} after the good state {'are' if lost > 1 else 'is'} not repeated, "
                f"because the loop has overwritten the batches"
            )
        self._suspect = None
        self._log(suspect, found, action)
        if before and found.cause == "batch":  # so that the next bad batch costs no repeated steps
            self._save_state()

    def _before(self, since: int, step: int) -> tuple[int | None, list[Moment]]:
        """Return the last step from ``since`` to before ``step`` with a normal loss, and its batches.

        The batches are missing if they cannot be repeated.
        """
        last = self._symptoms.last_normal(since, step)
        return last, [] if last is None or last in self._data.spoilt else self._data.moments_of(last)

    def _skip(self, step: int) -> None:
        self._data.passed.add(step)
        self._progress.skipped.append(step)

    # --- log --------------------------------------------------------------------------------------------------

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
            one.tell(self._folder, sum(other.needed_no_return for other in self.returns))

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
        """Write ``recovery.json`` into a folder, and return the path of the file.

        Args:
            folder: The output folder, which is created if it does not exist.
        """
        path = Path(folder) / "recovery.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.to_json() + "\n")
        return path
