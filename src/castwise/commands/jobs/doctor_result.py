"""The results of ``castwise doctor``: frozen dataclasses that convert to tables and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from castwise.core.devices import Features
from castwise.lab.result import Result
from castwise.lab.timing import stats
from castwise.lab.timing.environment import Environment
from castwise.lab.timing.limits import StepProfile
from castwise.lab.timing.matrix_units import MatrixUnits
from castwise.lab.timing.rates import Bandwidth, FormatGrade, Grade, Rate


@dataclass(frozen=True)
class Bottleneck:
    """What limits the speed of a workload's training step, and what to do about it.

    Attributes:
        what: ``data``, ``dispatch`` or ``outside matrix units``.
        measured: The measured figures, by name.
        advice: What to do.
        sentence: A sentence that describes the bottleneck.
    """

    what: str
    measured: Mapping[str, float | int | str]
    advice: str
    sentence: str


@dataclass(frozen=True)
class StepRate:
    """The time of a workload's training step under a plan.

    Attributes:
        plan: The name of a preset.
        time: The time per step; None if timing was not completed.
        speedup: The speedup over fp32; None for fp32, or if timing was not completed.
        grade: The grade of the plan's format, such as ``fast`` or ``avoid``; None for fp32.
        reason: Why timing was not completed, or an empty text.
    """

    plan: str
    time: stats.Summary | None = None
    speedup: stats.Ratio | None = None
    grade: Grade | None = None
    reason: str = ""


@dataclass(frozen=True)
class WorkloadReport:
    """The speed of a workload's training step in each format, and the bottlenecks of the step in fp32.

    There are no bottlenecks if none of the known kinds was found.
    """

    name: str
    description: str
    steps: tuple[StepRate, ...]
    profile: StepProfile
    bottlenecks: tuple[Bottleneck, ...]


@dataclass(frozen=True)
class DoctorResult(Result):
    """What ``castwise doctor`` measured of a device and, if one was given, of a workload on the device.

    ``rates`` holds the speed of every measured operator in every format that the device can run. ``grades`` holds a grade for
    every format except fp32. ``features`` tells what torch has for the device. ``notes`` are sentences about the measurement
    itself.
    """

    kind: ClassVar[str] = "doctor"
    environment: Environment
    units: MatrixUnits
    features: Features
    rates: tuple[Rate, ...]
    bandwidth: Bandwidth
    grades: tuple[FormatGrade, ...]
    workload: WorkloadReport | None = None
    notes: tuple[str, ...] = ()

    def _fields(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        if self.workload is not None:
            shares = {
                name: getattr(self.workload.profile, name) for name in ("outside_share", "launch_share")
            }
            record["workload"]["profile"] |= shares
        return record
