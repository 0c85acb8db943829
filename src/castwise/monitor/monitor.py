"""``Monitor``: numerics of a running training, sampled, with alarms and audits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from castwise.monitor.alarms import Line
from castwise.monitor.records import Alarm, Audit, MonitorReport
from castwise.session import Amp

if TYPE_CHECKING:
    from rich.console import RenderableType

EVERY = 64
"""Steps between two samples by default: bench/bench_monitor.py has what that costs."""
AUDIT_EVERY = 2000
"""Steps between two audits by default: they then cost less than 1 % of the training's time."""


class Monitor:
    """Watches the trainings of a session: cheap enough to be always on, and nothing of the training notices.

    ::

        amp = castwise.Amp("fp16-mixed")
        model, optimizer = amp.prepare(model, optimizer)
        with castwise.Monitor(amp, jsonl="monitor.jsonl") as monitor:
            ...  # the loop as it is
        rich.print(monitor.table())

    Steps count themselves, whoever makes them: ``amp.step``, ``optimizer.step()``, Lightning, the Trainer of transformers. The monitor may be
    made before ``prepare`` or after it. At every ``every``-th step of an optimizer it looks at gradients, weights, the update and
    the outputs of modules that have parameters of their own; skipped steps and the loss scale it follows at every step.
    Weights, gradients, random numbers and modes are bit for bit those of a run without it.

    Args:
        amp: The session.
        every: Steps between two samples, by each optimizer's own count.
        jsonl: A file to which each sample, alarm and audit is appended as a line of JSON.
        tensorboard: A folder for event files, or a ``SummaryWriter``.
        log: ``log(values, step)``, called with every sample's numbers by name: ``wandb.log``, ``logger.log_metrics``. What it raises is
            a warning, once, and the training goes on.
        live: Show the last sample and the open alarms in the terminal, where there is one.
        on_alarm: ``on_alarm(alarm)``, called with each :class:`Alarm` when it is raised, behind the step that raised it, on
            every rank with the same. What it raises goes through that step, which has been made or skipped whole: a way to end a run.
        lines: By kind of alarm another :class:`~castwise.monitor.alarms.Line`, or None to leave it out; see
            :data:`castwise.monitor.alarms.LINES`.
        loss: ``loss(model, batch)`` -> scalar tensor; with ``batches`` the plan is audited: held against fp32 as in :func:`castwise.parity`, on
            copies of the model as trained so far, which for that time take about five times the memory of fp32 weights.
        batches: For audits: a sequence, an iterable that can be gone through again, or ``batches(seed)`` -> iterator.
        audit_every: Steps between two audits; the first is made behind the first step.
        accumulate: Microbatches that one update of the training averages, on all ranks together.

    Where torch.distributed is in use, every rank makes the same monitor; samples are joined over the session's ranks, and the
    first of them writes.

    Attributes:
        samples: The last ones, 512 at most.
        alarms: All that were raised.
        audits: All that were made.

    Raises:
        PlanError: A number, line or kind that cannot be; it names the argument.
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
        raise NotImplementedError

    @property
    def step(self) -> int:
        """Steps so far, of the optimizer that made most; skipped ones count."""
        raise NotImplementedError

    @property
    def open_alarms(self) -> tuple[Alarm, ...]:
        """Alarms that were raised and not cleared since."""
        raise NotImplementedError

    def audit(self) -> Audit:
        """Hold the plan against fp32 now, at the weights as they are; every rank calls it. Waits for the device."""
        raise NotImplementedError

    def report(self) -> MonitorReport:
        """What was seen so far."""
        raise NotImplementedError

    def table(self) -> RenderableType:
        """The report, for ``rich.print``."""
        return self.report().table()

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return self.report().to_dict()

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the report: ``monitor.json`` and the page ``monitor.html``."""
        return self.report().save(Path(folder))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from: counts and open alarms. Plain values."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        raise NotImplementedError

    def close(self) -> None:
        """End watching and close files; what was seen stays to be read."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
