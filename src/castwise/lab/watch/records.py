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
    """Statistics of one module in one sampled step, without those of its submodules.

    The module has parameters of its own. A value is None if it could not be observed.

    Attributes:
        path: The path of the module. It is empty for the model itself.
        grad_norm: The L2 norm of the unscaled gradients of the module's parameters, before the optimizer's step.
        weight_norm: The L2 norm of the module's parameters before the step, or of their fp32 master weights if these
            exist.
        update_ratio: The norm of the update divided by the norm of the weights. It is computed from at most
            ``ELEMENTS`` (16384) elements of each parameter.
        drift: How far the weights moved between the previous sample and this step. It is the norm of the change
            divided by the norm of the weights.
        output: The largest magnitude of the module's outputs.
        near_overflow: The share of the elements of the module's fp16 outputs that are above 65504 / 8. The largest
            fp16 number is 65504.
        zero: The share of exact zeros in the gradients of the module's fp16 outputs.
        subnormal: The share of the nonzero elements of the same gradients that are below fp16's smallest normal
            number.
        underflow: An upper bound of the rounding error that subnormal numbers and zeros add to the same gradients. It
            is the squared error divided by the squared gradient.
        lost_updates: The share of the squared norm of the module's updates that rounding has dropped since the
            previous sample. It is measured if parameters are stored in bf16 or fp16 without fp32 master weights.
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
    """The values that a :class:`castwise.Monitor` observed in one step of one optimizer.

    Attributes:
        step: The number of the optimizer's step, including skipped steps. The first step is 1.
        optimizer: The index of the optimizer among those that the monitored :class:`castwise.Amp` prepared, from 0.
        skipped: Whether the step was skipped. None if only the device knows.
        skipped_steps: The number of skipped steps so far, of all optimizers.
        loss_scale: The loss scale of the gradients. None under a plan without a loss scale.
        grad_norm: The L2 norm of all unscaled gradients of the optimizer's parameters.
        update_ratio: The norm of the whole update divided by the norm of the weights.
        lost_updates: The same as in :class:`RegionSample`, over all modules.
        regions: The statistics of each module that has parameters of its own.
        loss: The loss of the last microbatch, the largest of all ranks. None if it was not passed to a method of the
            :class:`castwise.Amp`, such as ``backward``.
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
        """Return every number of the sample by a name for loggers, such as ``grad_norm`` or ``encoder.0/grad_norm``.

        The path of a module and the name of its value are separated by a slash.
        """
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
    """A warning by a :class:`castwise.Monitor` that a value of the training has crossed a threshold.

    An alarm is raised once. It is raised again only after the value has become good, which clears the alarm.

    Attributes:
        kind: The kind of alarm, which is a key of ``castwise.lab.watch.LINES``.
        step: The step of the optimizer at which the alarm was raised.
        region: The path of the module. It is empty for the whole model.
        value: The value that crossed the threshold.
        line: The threshold.
        message: The problem and what to do about it, in a sentence or two.
        cleared: The step at which the alarm was cleared. None while the alarm is open. A cleared alarm is reported
            once more, with this step.
        optimizer: The index of the optimizer among those that the monitored :class:`castwise.Amp` prepared, from 0.
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
    """A comparison of the plan's gradients with those of fp32 during training, at the weights of one step.

    A plan decides the formats in which a model computes and stores its weights. The comparison measures the damage,
    that is the relative squared error that the plan adds to an optimizer update.

    Attributes:
        step: The number of the step after which the audit was made.
        verdict: ``sound`` if the damage on the first few microbatches is far below the threshold at which plans fail.
            Otherwise more microbatches decide, as in :func:`castwise.parity`: ``pass``, ``fail`` or ``undecided``. It
            is also ``undecided`` if fp32 itself cannot be the reference, for example because its loss is not finite.
        reason: The reason for the verdict, in a sentence.
        damage: The damage. None if it was not computed.
        adam: The damage in units of Adam's steps. None if the optimizer is not of Adam's kind.
        microbatches: The number of microbatches that were compared, on all ranks.
        time_s: The time of the audit in seconds, during which training waits.
        regions: The modules that contribute most to the damage, the worst first. Each entry is a path and a share.
        rank: The rank that made this audit. Of the audits of all ranks, the worst is reported.
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
    """The results of a :class:`castwise.Monitor` so far.

    Attributes:
        plan: The plan of the training, as text.
        device: The type of device on which the training runs.
        steps: The number of steps of the optimizer with the most steps.
        skipped_steps: The number of skipped steps of all optimizers.
        every: The number of steps from one sample to the next.
        samples: The last 512 samples.
        alarms: The last 512 alarms that were raised.
        audits: The last 512 audits.
        open_alarms: The alarms that were raised and are not yet cleared.
        unseen: Values that could not be observed and why, in sentences.
        restored_buffers: For each buffer, how often a skipped step made it non-finite. The buffer then got its last
            finite values back.
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
        """Return the result as a dict of values that JSON can hold.

        castwise makes its reports from this dict. Non-finite numbers become None. The entry ``not_finite`` of each
        sample and module names them.
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
        """Write ``monitor.json`` and ``monitor.html``, a page for a browser, into a folder, and return the folder.

        If a library for the page is not installed, a warning is given and only the JSON file is written.

        Args:
            folder: The output folder, which is created if it does not exist.
        """
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
