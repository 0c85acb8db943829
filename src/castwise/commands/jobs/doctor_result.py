"""Results of the doctor: frozen dataclasses that convert to tables and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from castwise.lab.result import Result
from castwise.lab.timing import stats
from castwise.lab.timing.environment import Environment
from castwise.lab.timing.limits import StepProfile
from castwise.lab.timing.matrix_units import MatrixUnits
from castwise.lab.timing.rates import Bandwidth, FormatGrade, Grade, Rate


@dataclass(frozen=True)
class Bottleneck:
    """A bottleneck of a workload, with its figures by name and a remedy.

    Attributes:
        what: ``data``, ``dispatch``, or ``outside matrix units``.
    """

    what: str
    measured: Mapping[str, float | int | str]
    advice: str
    sentence: str


@dataclass(frozen=True)
class StepRate:
    """Time of a training step under a plan.

    Attributes:
        plan: A preset's name.
        time: Time per step; None if timing was not completed.
        speedup: Speedup over fp32; None for fp32, or if timing was not completed.
        grade: Grade of the format; None for fp32.
        reason: Why timing was not completed; else empty.
    """

    plan: str
    time: stats.Summary | None = None
    speedup: stats.Ratio | None = None
    grade: Grade | None = None
    reason: str = ""


@dataclass(frozen=True)
class WorkloadReport:
    """Speed of a workload's step in each format, and its bottlenecks in fp32.

    The bottlenecks are empty if none of the known kinds applies.
    """

    name: str
    description: str
    steps: tuple[StepRate, ...]
    profile: StepProfile
    bottlenecks: tuple[Bottleneck, ...]


@dataclass(frozen=True)
class DoctorResult(Result):
    """Measurements of a device, and optionally of a workload on it.

    There is a rate for every operator in every format that runs, and a grade for every format except fp32. Notes are
    sentences about the measurement itself.
    """

    kind: ClassVar[str] = "doctor"
    environment: Environment
    units: MatrixUnits
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
