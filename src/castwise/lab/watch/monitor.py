"""Monitor the numerics of a running training: sample statistics, raise alarms, and audit the plan against fp32."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from castwise.core import _torch
from castwise.core.masters import OfThisProcess
from castwise.core.scaler import StepResult
from castwise.core.session.amp import Amp, SessionView
from castwise.errors import CheckpointError, NonFiniteError, PlanError, StateError, check_count
from castwise.lab.watch.alarms import Alarms, Line, lines_of
from castwise.lab.watch.audit import Auditor, badness, failed
from castwise.lab.watch.detector import Detector
from castwise.lab.watch.records import Alarm, Audit, MonitorReport, Sample
from castwise.lab.watch.sampling import Sampler
from castwise.lab.watch.sinks import Board, JsonLines, Log, Screen, Sinks
from castwise.lab.watch.statistics import Outputs
from castwise.lab.watch.turns import Turn

if TYPE_CHECKING:
    from rich.console import RenderableType

EVERY = 128
"""Default number of steps between two samples; bench/bench_monitor.py measures the cost."""
AUDIT_EVERY = 5000
"""Default number of steps between two audits, at which audits cost less than 1 % of the training's time."""


KEPT = 512
"""Number of samples, of alarms and of audits that are kept."""


class Monitor(OfThisProcess):
    """Watches a training run: samples its numbers, raises alarms, and can compare the plan with fp32.

    Use it to notice overflow, underflow, skipped steps and similar trouble while a model trains. It costs little and
    does not change the training.

    ::

        amp = castwise.Amp("fp16-mixed")
        model, optimizer = amp.prepare(model, optimizer)
        with castwise.Monitor(amp, jsonl="monitor.jsonl") as monitor:
            ...  # the loop as it is
        rich.print(monitor.table())

    The monitor counts the steps of the optimizers that ``amp`` prepared. Steps may be made by ``amp.step``,
    ``optimizer.step()``, Lightning or the Trainer of transformers. The monitor may be made before or after
    ``prepare``.

    It takes a sample at every ``every``-th step of an optimizer. A sample has statistics of the gradients, the
    weights, the update, and the outputs of modules that have parameters of their own. Skipped steps and the loss
    scale are recorded at every step. Weights, gradients, random numbers and training modes are bit for bit those of a
    run without the monitor.

    Args:
        amp: The :class:`castwise.Amp` whose models are watched.
        every: The number of steps from one sample to the next, counted for each optimizer.
        jsonl: A file to which each sample, alarm and audit is appended as a line of JSON.
        tensorboard: A folder for event files, or a ``SummaryWriter``.
        log: A function ``log(values, step)`` such as ``wandb.log`` or ``logger.log_metrics``. It is called at every
            sample with a dict of numbers by name. If it raises an error, a warning is given once and training
            continues.
        live: Whether to show the last sample and the open alarms, if standard output is a terminal.
        on_alarm: A function ``on_alarm(alarm)``. It is called on every rank with each new
            :class:`castwise.monitor.Alarm`, after the step that raised the alarm is complete. If it raises an
            exception, the exception leaves the call that made the step. It can thus end a run.
        lines: For a kind of alarm, a :class:`castwise.monitor.Line` with other thresholds than the default, or None
            to disable the alarm. ``castwise.lab.watch.LINES`` lists the kinds and their defaults.
        loss: A function ``loss(model, batch)`` that returns a scalar tensor. If ``loss`` and ``batches`` are given,
            the monitor makes audits. An audit compares the plan's gradients with those of fp32, as
            :func:`castwise.parity` does. It runs on copies of the current model, which take about five times the
            memory of fp32 weights. For a sharded model, that is the memory of all weights, on every rank.
        batches: The batches for audits: a sequence, an iterable that can be iterated again, or a function
            ``batches(seed)`` that returns an iterator.
        audit_every: The number of steps from one audit to the next. The first audit follows the first step that this
            monitor sees.
        accumulate: The number of microbatches, on all ranks together, that the training averages for one update.

    With torch.distributed, every rank must make the same monitor. Samples are combined over the ranks of ``amp``, and
    the first rank writes them.

    Attributes:
        samples: The last 512 samples.
        alarms: The last 512 alarms that were raised.
        audits: The last 512 audits.

    Raises:
        PlanError: A number, a threshold or a kind of alarm is invalid. The message names the argument.
    """

    def __init__(
        self,
        amp: Amp,
        *,
        every: int = EVERY,
        jsonl: str | os.PathLike[str] | None = None,
        tensorboard: Any = None,
        log: Callable[[dict[str, float], int], object] | None = None,
        live: bool = False,
        on_alarm: Callable[[Alarm], object] | None = None,
        lines: Mapping[str, Line | None] | None = None,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        batches: Any = None,
        audit_every: int = AUDIT_EVERY,
        accumulate: int = 1,
    ) -> None:
        if not isinstance(amp, Amp):
            raise PlanError(f"Monitor({type(amp).__name__}): needs a castwise.Amp, the session to monitor")
        for name, value in (("every", every), ("audit_every", audit_every), ("accumulate", accumulate)):
            check_count("Monitor", name, value, 1)
        if on_alarm is not None and not callable(on_alarm):
            raise PlanError(f"Monitor(on_alarm={on_alarm!r}): needs a function that takes an Alarm")
        if (loss is None) != (batches is None):
            given, lacks = ("batches", "loss") if loss is None else ("loss", "batches")
            raise PlanError(
                f"Monitor({given}=...): an audit needs {lacks}= too; give both, or neither for no audits"
            )
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self.alarms: deque[Alarm] = deque(maxlen=KEPT)
        self.audits: deque[Audit] = deque(maxlen=KEPT)
        self._amp, self._session = amp, SessionView(amp)
        self._every, self._audit_every, self._on_alarm = every, audit_every, on_alarm
        self._crossed = Alarms(lines_of(lines))
        self._auditor = None if loss is None else Auditor(loss, batches, accumulate)
        self._sampler = Sampler(amp)
        self._detector = Detector(amp, self._crossed, self._sampler.watch)
        self._audited = self._closed = False
        self._turns: dict[int, Turn] = {}
        self._turn_by_id: dict[int, tuple[weakref.ref[Optimizer], Turn]] = {}
        self._to_tell: list[Alarm] = []
        self._sinks = Sinks(
            [
                *([] if jsonl is None else [JsonLines(jsonl)]),
                *([] if tensorboard is None else [Board(tensorboard)]),
                *([] if log is None else [Log(log)]),
                *([Screen()] if live else []),
            ]
            if self._session.ranks.rank == 0
            else []
        )
        # the global optimizer hooks hold only a weak reference to the monitor; the session keeps the monitor alive
        alive = weakref.ref(self)
        self._end = weakref.finalize(self, _end, _hooks(alive), self._sampler.outputs)
        self._end.atexit = False
        self._listened = amp.listen(losses=self._sampler.hear, steps=self._stepped)

    # --- observed values ----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of steps so far, including skipped steps.

        If there are several optimizers, only the steps of the optimizer with the most steps count.
        """
        return max((turn.steps for turn in self._turns.values()), default=0)

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps so far, including those before a resume.

        Reading it waits for the device if a fused optimizer decides on the device whether to skip a step.
        """
        return self._sampler.skipped_before + self._session.window.skipped_steps

    @property
    def open_alarms(self) -> tuple[Alarm, ...]:
        """The alarms that were raised and are not yet cleared."""
        return tuple(self._crossed.open.values())

    def report(self) -> MonitorReport:
        """Return all results so far as a :class:`castwise.monitor.MonitorReport`.

        The call waits for the device if a fused optimizer decides on the device whether to skip a step.
        """
        return MonitorReport(
            str(self._amp.plan), self._amp.device_type, self.step, self.skipped_steps, self._every,
            tuple(self.samples), tuple(self.alarms), tuple(self.audits), tuple(self._sampler.unseen), self.open_alarms,
            tuple(self._amp.restored_buffers.items()),
        )  # fmt: skip

    def table(self) -> RenderableType:
        """Return the results so far as text and tables that ``rich.print`` can show."""
        return self.report().table()

    def to_dict(self) -> dict[str, Any]:
        """Return the results so far as a dict of values that JSON can hold."""
        return self.report().to_dict()

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the results so far as ``monitor.json`` and ``monitor.html`` into a folder, and return the folder.

        If a library for the page is not installed, a warning is given and only the JSON file is written.

        Args:
            folder: The output folder, which is created if it does not exist.
        """
        return self.report().save(Path(folder))

    def audit(self) -> Audit:
        """Compare the plan's gradients with those of fp32 at the present weights, and return the comparison.

        All ranks must call this method together. It waits for the device.

        Raises:
            PlanError: The monitor was made without ``loss`` and ``batches``, or its :class:`castwise.Amp` has no
                model or several.
            CastwiseError: The model, the loss or the batches cannot be used.
        """
        if self._auditor is None:
            raise PlanError("Monitor.audit(): needs Monitor(amp, loss=..., batches=...)")
        found = self._session.ranks.every(self._audit)
        return self._note_audit(found)

    # --- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the step counts and the open alarms as plain values, so that a resumed run can continue them.

        The state of the :class:`castwise.Amp` is not included and must be saved separately.
        """
        turns = [
            {"number": t.number, "steps": t.steps, "streak": t.streak, "made": t.made}
            for t in self._turns.values()
        ]
        return {
            "version": 1, "turns": turns, "open_alarms": self._crossed.state(), "skipped_steps": self.skipped_steps,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the step counts and open alarms that :meth:`state_dict` returned.

        Raises:
            CheckpointError: ``state`` is not the state of a monitor.
        """
        try:
            if state["version"] != 1:
                raise ValueError(f"version {state['version']!r}")
            turns = [Turn(every=self._every, **values) for values in state["turns"]]
            skipped = state.get("skipped_steps", 0)
            counts = [skipped, *(count for turn in turns for count in (turn.number, turn.steps, turn.streak))]
            if not all(type(count) is int and count >= 0 for count in counts):
                raise ValueError("a count that is not an integer >= 0")
            self._crossed.load(state["open_alarms"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"Monitor.load_state_dict: not the state_dict() of a Monitor ({type(error).__name__}: {error})"
            ) from error
        self._sampler.skipped_before = skipped - self._session.window.skipped_steps
        self._turns = {turn.number: turn for turn in turns}
        self._turn_by_id.clear()

    def close(self) -> None:
        """Stop watching, and close all files. The results can still be read."""
        self._closed = True
        self._listened()
        self._end()
        self._sinks.close()

    # --- around steps -------------------------------------------------------------------------------------

    def _turn(self, optimizer: Optimizer) -> Turn:
        known = self._turn_by_id.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        places = [id(one) for one in self._session.members.optimizers]
        number = places.index(id(optimizer))
        turn = self._turns.setdefault(number, Turn(number, self._every))
        self._turn_by_id[id(optimizer)] = weakref.ref(optimizer), turn
        return turn

    def _before(self, optimizer: Optimizer, closure: bool) -> None:
        """Prepare to count the step that an optimizer begins, and read gradients and weights if a sample is due."""
        session = self._session
        if not session.members.holds(optimizer):
            return
        session.agreement.check_even("Monitor")
        turn = self._turn(optimizer)
        turn.closure, turn.skips, turn.update = closure, session.window.skips, None
        rates = [group["lr"] for group in optimizer.param_groups if type(group.get("lr")) is float]
        if rates and turn.note_rate(rates) and session.ranks.size == 1:  # ranks must sample the same steps
            turn.due = True
        if self._sampler.reads and self._sampler.watch.high == 1 and not turn.gap:
            turn.due = True
        if turn.due and not _torch.tensors.dynamo_callback():
            self._sampler.attempt("gradients and weights", self._sampler.look, optimizer, turn)

    def _after(self, optimizer: Optimizer) -> None:
        """Read the updated weights after an optimizer's step if a sample is due, and count the step."""
        session = self._session
        if not session.members.holds(optimizer):
            return
        turn = self._turn(optimizer)
        if turn.update is not None:
            self._sampler.attempt("updates", self._sampler.look_again, turn, turn.update)
        if id(optimizer) not in session.window.stepping:  # in amp.step, the session calls _stepped at the end
            self._ended(optimizer, session.window.skips > turn.skips)

    def _stepped(self, optimizers: Sequence[Optimizer], result: StepResult) -> None:
        """Count a step that the session has made for these optimizers."""
        skipped = result.skipped if result.known else None
        for optimizer in optimizers:
            self._ended(optimizer, skipped)

    def _ended(self, optimizer: Optimizer, skipped: bool | None) -> None:
        turn = self._turn(optimizer)
        due, update, turn.update = turn.due, turn.update, None
        turn.count(skipped)
        if skipped:
            self._detector.note_skip(optimizer, turn)
        elif self._crossed.open and turn.streak == 0:
            self._detector.see("skipped_in_a_row", {"": float(turn.streak)}, turn)
        self._take_news()
        if due:
            sample = self._sampler.sample(turn, update, skipped)
            self.samples.append(sample)
            self._write(sample)
            self._detector.check(turn, sample, self._sampler.trained())
        if turn.number == 0:
            self._detector.check_loss(turn)
        self._take_news()
        if (
            self._auditor is not None
            and turn.number == 0
            and (turn.steps % self._audit_every == 0 or not self._audited)
        ):
            self._audited = True
            self._note_audit(self._session.ranks.every(self._audit_or_say))
        if self._sampler.outputs.armed or turn.due:
            self._sampler.arm(self._turns.values())
        while self._to_tell:
            alarm = self._to_tell.pop(0)
            if self._on_alarm is not None:
                self._on_alarm(alarm)

    # --- audits -------------------------------------------------------------------------------------------

    def _audit_or_say(self) -> Audit:
        """Make an audit, and return an error as an undecided audit.

        The first audit raises errors, except non-finite values in fp32, so that an invalid loss or invalid batches are noticed.
        """
        try:
            return self._audit()
        except Exception as error:
            if not (self.audits or isinstance(error, NonFiniteError)):
                raise  # the first audit reports an invalid loss or invalid batches
            mine = failed(error)
            self._sampler.note_unseen(mine.reason)
            return mine

    def _audit(self) -> Audit:
        members, auditor = self._session.members, self._auditor
        assert auditor is not None
        if len(members.models) != 1:
            raise PlanError(
                f"Monitor(loss=...): an audit needs a session with one model, and this one has {len(members.models)}; leave "
                f"loss= and "
                f"batches= out"
            )
        (model,) = members.models
        optimizer = next(iter(members.optimizers), None)
        return auditor.audit(
            self._amp.plan, self._amp.get_scale(), model, members.arrived.get(model, {}), optimizer
        )

    def _note_audit(self, found: Sequence[Audit]) -> Audit:
        """Record the worst of the audits that the ranks have made, and return it."""
        worst = max(range(len(found)), key=lambda rank: badness(found[rank]))
        count = sum(audit.microbatches for audit in found)
        audit = dataclasses.replace(found[worst], step=self.step, rank=worst, microbatches=count)
        self.audits.append(audit)
        self._write(audit)
        if audit.verdict != "undecided" and self._turns:
            value = float(audit.verdict == "fail")
            self._detector.see("audit", {"": value}, self._turns[min(self._turns)], lambda: audit.reason)
            self._take_news()
        return audit

    # --- output -------------------------------------------------------------------------------------------

    def _take_news(self) -> None:
        while self._detector.news:
            alarm = self._detector.news.pop(0)
            if alarm.cleared is None:
                self.alarms.append(alarm)
                self._to_tell.append(alarm)
            self._write(alarm)

    def _write(self, event: Sample | Alarm | Audit) -> None:
        if self._session.ranks.rank == 0:
            self._sinks.write(event, self._now)

    def _now(self) -> MonitorReport:
        """Return a report with only the last sample and audit, so that drawing it on the terminal takes constant time."""
        whole = self.report()
        return dataclasses.replace(whole, samples=whole.samples[-1:], audits=whole.audits[-1:])

    def __enter__(self) -> Self:
        if self._closed:
            raise StateError("Monitor: this monitor was closed; make a new one")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _hooks(alive: weakref.ref[Monitor]) -> Callable[[], None]:
    """Call a monitor before and after every optimizer step as long as it exists; return a function that stops this."""

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        monitor = alive()
        if monitor is not None:
            monitor._before(optimizer, _torch.steps.closure_of(args, kwargs) is not None)

    def after(optimizer: Optimizer, *_: object) -> None:
        monitor = alive()
        if monitor is not None:
            monitor._after(optimizer)

    return _torch.steps.subscribe(before, after)


def _end(unhook: Callable[[], None], outputs: Outputs) -> None:
    unhook()
    outputs.disarm()
