"""Hold the results of a monitor as frozen dataclasses: samples, alarms, audits, and the report of a run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from castwise.lab.result import Result
from castwise.lab.timing.environment import environment


@dataclass(frozen=True)
class RegionSample:
    """Statistics of one module in one sampled step. The module has parameters of its own. None stands for unobserved values.

    Attributes:
        path: Path of the module; ``""`` is the root.
        grad_norm: L2 norm of the unscaled gradients of its parameters, before the optimizer's step.
        weight_norm: L2 norm of its parameters before the step, or of their masters, if there are any.
        update_ratio: Norm of the update divided by the norm of the weights, from at most ``ELEMENTS`` elements of each
            parameter.
        drift: How far its weights moved between the previous sample and this step: norm of the change divided by their norm.
        output: Largest magnitude of its outputs.
        near_overflow: Share of the elements of its fp16 outputs above an eighth of 65504.
        zero: Share of exact zeros in the gradients of its fp16 outputs.
        subnormal: Share of the nonzero elements of these gradients that are below fp16's smallest normal number.
        underflow: Upper bound of the rounding error that subnormal numbers and zeros add to these gradients: squared error
            divided by squared gradient.
        lost_updates: Share of the squared norm of its updates that rounding has dropped since the previous sample, if
            parameters are stored in bf16 or fp16 without masters.
    """

    path: str
    grad_norm: float | None = None
    weight_norm: float | None = None
    update_ratio: float | None = None
    drift: float | None = None
    output: float | None = None
    near_overflow: float | None = None
    zero: float | None = None
    subnormal: float | None = None
    underflow: float | None = None
    lost_updates: float | None = None


@dataclass(frozen=True)
class Sample:
    """One sampled step of one optimizer.

    Attributes:
        step: Number of the optimizer's step, including skipped steps; the first is 1.
        optimizer: Index of the optimizer among the session's optimizers, from 0.
        skipped: Whether the step was skipped; None if only the device knows.
        skipped_steps: Number of skipped steps so far, of all optimizers.
        loss_scale: Loss scale of the gradients; None under a plan without one.
        grad_norm: L2 norm of all unscaled gradients of the optimizer's parameters.
        update_ratio: Norm of the whole update divided by the norm of the weights.
        lost_updates: As in :class:`RegionSample`, over all modules.
        regions: The statistics of each module.
        loss: The loss of the last microbatch, the largest of all ranks; None if it did not pass through the session.
    """

    step: int
    optimizer: int = 0
    skipped: bool | None = False
    skipped_steps: int = 0
    loss_scale: float | None = None
    grad_norm: float | None = None
    update_ratio: float | None = None
    lost_updates: float | None = None
    regions: tuple[RegionSample, ...] = ()
    loss: float | None = None

    def scalars(self) -> dict[str, float]:
        """Return every number by a slash-separated name, as loggers expect: ``grad_norm``, ``encoder.0/grad_norm``, ..."""
        prefix = f"optimizer{self.optimizer}/" if self.optimizer else ""
        out: dict[str, float] = {}
        for name in _SCALARS:
            value = getattr(self, name)
            if value is not None:
                out[prefix + name] = float(value)
        for region in self.regions:
            for name in _REGION_SCALARS:
                value = getattr(region, name)
                if value is not None:
                    out[f"{prefix}{region.path or '(model)'}/{name}"] = value
        return out


_SCALARS = ("loss", "grad_norm", "update_ratio", "lost_updates", "loss_scale", "skipped_steps")
_REGION_SCALARS = tuple(field.name for field in dataclasses.fields(RegionSample) if field.name != "path")


@dataclass(frozen=True)
class Alarm:
    """A warning that a value of the training has crossed its line. It is raised once, and again only after it was cleared.

    Attributes:
        kind: A key of ``castwise.lab.watch.LINES``.
        step: The optimizer's step at which the alarm was raised.
        region: Path of the module; ``""`` is the whole model.
        value: The value that crossed the line.
        line: The threshold that the value crossed.
        message: The problem and what to do about it, in a sentence or two.
        cleared: The step at which the alarm was cleared; None while it is open. A cleared alarm is reported once more, with
            this step.
        optimizer: Index of the optimizer among the session's optimizers, from 0.
    """

    kind: str
    step: int
    region: str
    value: float
    line: float
    message: str
    cleared: int | None = None
    optimizer: int = 0


@dataclass(frozen=True)
class Audit:
    """A comparison of the plan's gradients with fp32's during training, at the weights of one step.

    Attributes:
        step: Number of the step after which the audit was made.
        verdict: ``sound`` if the damage on the first few microbatches is far below the line at which plans fail. Else the
            verdict of the gradient parity test on more microbatches: ``pass``, ``fail`` or ``undecided``. It is also
            ``undecided`` if fp32 itself is no reference, for example because its loss is not finite.
        reason: The reason for the verdict, in a sentence.
        damage: Relative squared error that the plan adds to an update; None if it was not computed.
        adam: The damage in units of Adam's steps; None for other optimizers.
        microbatches: Number of microbatches that were compared, on all ranks.
        time_s: Wall-clock time of the audit, during which training waits.
        regions: The modules that contribute most to the damage, the worst first: path and share.
        rank: The rank whose audit this is: of all ranks' audits, the worst is reported.
    """

    step: int
    verdict: str
    reason: str
    damage: float | None = None
    adam: float | None = None
    microbatches: int = 0
    time_s: float = 0.0
    regions: tuple[tuple[str, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class MonitorReport(Result):
    """The results of a monitor so far.

    Attributes:
        plan: The session's plan, as text.
        device: The type of device on which the training runs.
        steps: Number of steps of the optimizer with the most steps.
        skipped_steps: Number of skipped steps of all optimizers.
        every: Steps between two samples.
        samples: The last 512 samples.
        alarms: The last 512 alarms that were raised.
        audits: The last 512 audits.
        open_alarms: Alarms that are not yet cleared.
        unseen: Values that could not be observed and why, in sentences.
        restored_buffers: For each buffer, how often a skipped step made it non-finite, so that it was restored.
    """

    kind: ClassVar[str] = "monitor"
    plan: str
    device: str
    steps: int
    skipped_steps: int
    every: int
    samples: tuple[Sample, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    audits: tuple[Audit, ...] = ()
    unseen: tuple[str, ...] = ()
    open_alarms: tuple[Alarm, ...] = ()
    restored_buffers: tuple[tuple[str, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types, from which reports are made.

        Non-finite numbers become None, and ``not_finite`` of their sample or module names them.
        """
        out = super().to_dict()
        for row, sample in zip(out["samples"], self.samples, strict=True):
            row["not_finite"] = _not_finite(sample)
            for region, seen in zip(row["regions"], sample.regions, strict=True):
                region["not_finite"] = _not_finite(seen)
        for alarm in out["alarms"]:
            alarm["open"] = alarm in out["open_alarms"]
        return out

    def save(self, folder: str | Path) -> Path:
        """Write ``monitor.json`` and, if its libraries are installed, the page ``monitor.html``; return the folder."""
        home = Path(folder)
        made_on = dataclasses.asdict(environment(torch.device(self.device)))
        self._save(
            home / "monitor.html",
            home / "monitor.json",
            workload="",
            description=self.plan,
            environment=made_on,
        )
        return home


def _not_finite(seen: Sample | RegionSample) -> list[str]:
    """Return the names of the non-finite numbers."""
    return [
        name for name, value in vars(seen).items() if isinstance(value, float) and not math.isfinite(value)
    ]
