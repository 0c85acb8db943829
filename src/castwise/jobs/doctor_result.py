"""What a doctor found, as frozen data that turns into tables and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from castwise.jobs.result import Result
from castwise.measure.environment import Environment
from castwise.measure.limits import StepProfile
from castwise.measure.matrix_units import MatrixUnits
from castwise.measure.rates import Bandwidth, Judgement, Rate

__all__ = ["DoctorResult", "Finding", "WorkloadReport"]


@dataclass(frozen=True)
class Finding:
    """One thing that limits a workload.

    Attributes:
        what: ``data``, ``dispatch``, ``outside matrix units`` or ``size``.
        measured: The numbers it rests on, by name.
        advice: What to do.
        sentence: What was found, in words.
    """

    what: str
    measured: Mapping[str, float | int | str]
    advice: str
    sentence: str


@dataclass(frozen=True)
class WorkloadReport:
    """What limits a workload on a device, in fp32.

    Attributes:
        name: Of the workload.
        description: Of the workload.
        profile: Where a training step's time goes.
        findings: What limits it; empty if nothing that a doctor knows.
    """

    name: str
    description: str
    profile: StepProfile
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class DoctorResult(Result):
    """A device, and perhaps a workload on it, as measured.

    Attributes:
        environment: What it was measured on.
        units: The device's matrix units.
        rates: Of every operator in every format that runs.
        bandwidth: Of a copy.
        verdicts: One per format other than fp32.
        workload: What limits the workload, where one was given.
        notes: What to know about the measurement, in sentences.
    """

    kind: ClassVar[str] = "doctor"
    environment: Environment
    units: MatrixUnits
    rates: tuple[Rate, ...]
    bandwidth: Bandwidth
    verdicts: tuple[Judgement, ...]
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
