"""What a monitor sees, as frozen data: samples, alarms, audits, and the report of a run."""

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
    """What one module with parameters of its own did in one sampled step; None where it was not to be seen.

    Attributes:
        path: Of the module; ``""`` is the root.
        grad_norm: L2 norm of the gradients of its parameters, unscaled, before the optimizer's step.
        weight_norm: L2 norm of its parameters before the step; of masters, where there are any.
        update_ratio: Norm of the update over norm of the weights, from at most ``ELEMENTS`` elements of each parameter.
        output: Largest magnitude of its outputs.
        near_overflow: Of its outputs in fp16, the share of elements above an eighth of 65504.
        zero: Of the gradients of its outputs in fp16, the share of elements that are exactly zero.
        subnormal: The share that is below fp16's smallest normal number and not zero.
        underflow: What rounding there adds to these gradients at most: error over gradient, both as sums of squares.
        lost_updates: Share of its updates that rounding dropped since the sample before, where parameters are stored
            low without masters.
    """

    path: str
    grad_norm: float | None = None
    weight_norm: float | None = None
    update_ratio: float | None = None
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
        step: The number of the optimizer's step, skipped ones counted; the first is 1.
        optimizer: Its place among the session's optimizers, from 0.
        skipped: Whether it was skipped; None where only the device knows.
        skipped_steps: Skipped steps so far, of all optimizers.
        loss_scale: The scale that its gradients were taken with; None under a plan without one.
        grad_norm: L2 norm of all its gradients, unscaled.
        update_ratio: Norm of the whole update over the norm of the weights.
        lost_updates: As in :class:`RegionSample`, over all regions.
        regions: By module.
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

    def scalars(self) -> dict[str, float]:
        """Every number by a name with slashes, as loggers want it: ``grad_norm``, ``encoder.0/grad_norm``, ..."""
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


_SCALARS = ("grad_norm", "update_ratio", "lost_updates", "loss_scale", "skipped_steps")
_REGION_SCALARS = tuple(field.name for field in dataclasses.fields(RegionSample) if field.name != "path")


@dataclass(frozen=True)
class Alarm:
    """A line that was crossed. It is raised once, and again only after it was cleared.

    Attributes:
        kind: What about: a key of ``castwise.lab.watch.LINES``.
        step: The optimizer's step at which it was raised.
        region: Module path; ``""`` is the whole model.
        value: What was seen.
        line: What it had to stay on the right side of.
        message: What it is and what to do about it, in a sentence or two.
        cleared: The step at which it ended; None while it is open. An alarm that ends is given out anew, with this set.
        optimizer: The optimizer's place among the session's, from 0.
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
    """The plan's gradients held against fp32's during training, at the weights of one step.

    Attributes:
        step: After which.
        verdict: ``sound``: the few microbatches that are looked at first are far below the line where plans fail. Else what the
            gradient parity test said on more of them: ``pass``, ``fail``, or ``undecided``; ``undecided`` too where fp32
            cannot say, as at a loss that is not finite.
        reason: In a sentence.
        damage: The relative error of an update, as a square; None where there is none.
        adam: The same in the units of Adam's steps; None for other optimizers.
        microbatches: How many were compared, on all ranks.
        time_s: Wall-clock time that training waited for it.
        regions: The modules that contribute most, the worst first: path and share.
        rank: The rank whose finding it is: the worst.
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
    """What a monitor has seen of a run so far.

    Attributes:
        plan: The session's plan, as text.
        device: The type of device that it runs on.
        steps: Of the optimizer that made most.
        skipped_steps: Skipped among them.
        every: Steps between two samples.
        samples: The last of them, 512 at most.
        alarms: All that were raised.
        audits: All that were made.
        open_alarms: Those of the alarms that were not cleared.
        unseen: What could not be looked at, and why, in sentences.
        restored_buffers: Buffers that skipped steps had made non-finite and that were put back, and how often each.
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
        """The record that reports are made from: JSON's own types.

        Numbers that are not finite are None, and named in the sample's or the region's ``not_finite``.
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
        """Write ``monitor.json`` and, where the libraries for it are there, the page ``monitor.html``; returns the folder."""
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
    """Names of the numbers that JSON has none for."""
    return [
        name for name, value in vars(seen).items() if isinstance(value, float) and not math.isfinite(value)
    ]
