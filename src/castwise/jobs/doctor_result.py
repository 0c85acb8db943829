"""What a doctor found, as frozen data that turns into tables and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from castwise.measure.environment import Environment
from castwise.measure.limits import StepProfile
from castwise.measure.matrix_units import MatrixUnits
from castwise.measure.rates import Bandwidth, Judgement, Rate

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

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
class DoctorResult:
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

    environment: Environment
    units: MatrixUnits
    rates: tuple[Rate, ...]
    bandwidth: Bandwidth
    verdicts: tuple[Judgement, ...]
    workload: WorkloadReport | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The record: plain data, as JSON has it."""
        record: dict[str, Any] = {"kind": "doctor", "version": 1, **dataclasses.asdict(self)}
        if self.workload is not None:
            profile = self.workload.profile
            record["workload"]["profile"] |= {
                "outside_share": profile.outside_share,
                "launch_share": profile.launch_share,
            }
        plain: dict[str, Any] = json.loads(json.dumps(record, allow_nan=False))
        return plain

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def table(self) -> RenderableType:
        """The result for ``rich.print``; readable from 80 columns on."""
        from rich.console import Group
        from rich.text import Text

        where, band = self.environment, self.bandwidth
        parts: list[RenderableType] = [
            Text(
                f"{where.device} ({where.device_type}, {where.threads} threads, torch {where.torch})",
                style="bold",
            ),
            Text(f"Matrix units: {self.units.sentence}"),
            Text(
                f"Memory: {band.gb_per_s:.3g} GB/s (quartiles {band.gb_per_s_low:.3g} to {band.gb_per_s_high:.3g})"
            ),
            Text(),
            self._rates(),
            self._verdicts(),
        ]
        if self.workload is not None:
            parts += self._workload(self.workload)
        parts += [Text(note, style="yellow") for note in self.notes]
        return Group(*parts)

    def _rates(self) -> Table:
        from rich.text import Text

        table = _table("Measured rates, GFLOP/s (quartiles) and ratio to fp32 [interval]")
        for title in ("operator", "format", "GFLOP/s", "ratio", "verdict"):
            table.add_column(title, justify="right" if title in ("GFLOP/s", "ratio") else "left")
        last = ""
        for rate in self.rates:
            speed = "-" if rate.gflops is None else f"{rate.gflops:,.3g}"
            if rate.gflops_low is not None and rate.gflops_high is not None:
                speed += f" ({rate.gflops_low:,.3g} to {rate.gflops_high:,.3g})"
            ratio = ""
            if rate.speedup is not None:
                ratio = f"{rate.speedup.value:.2g}x [{rate.speedup.low:.2g}, {rate.speedup.high:.2g}]"
            verdict = (rate.verdict or "") + (", small probe" if rate.probe and not rate.error else "")
            cells = [
                "" if rate.kernel == last else rate.kernel,
                rate.format,
                speed,
                ratio,
                rate.error or verdict,
            ]
            table.add_row(*map(Text, cells), style="yellow" if rate.verdict == "avoid" else None)
            last = rate.kernel
        return table

    def _verdicts(self) -> Table:
        from rich.text import Text

        table = _table("Formats on this device")
        for title in ("format", "verdict", "why"):
            table.add_column(title, overflow="fold")
        styles = {"fast": "bold green", "no gain": "dim", "avoid": "bold red"}
        for said in self.verdicts:
            except_in = f", not in {' and '.join(said.avoid_in)}" if said.avoid_in else ""
            table.add_row(
                Text(said.format),
                Text(said.verdict + except_in, style=styles[said.verdict]),
                Text(said.reason),
            )
        return table

    def _workload(self, report: WorkloadReport) -> list[RenderableType]:
        from rich.text import Text

        step = report.profile.step_s
        lines: list[RenderableType] = [
            Text(f"What limits {report.name} in fp32", style="bold cyan"),
            Text(
                f"A training step takes {step.median_s * 1e3:.3g} ms (quartiles {step.q1_s * 1e3:.3g} to "
                f"{step.q3_s * 1e3:.3g}), a batch {report.profile.data_s.median_s * 1e3:.3g} ms to come; "
                f"{report.profile.launches:.0f} operators per step, {1 - report.profile.outside_share:.0%} of their time "
                "in matrix products and convolutions."
            ),
        ]
        for finding in report.findings:
            lines += [Text(f"- {finding.sentence}", style="yellow"), Text(f"  {finding.advice}")]
        if not report.findings:
            lines.append(Text("Nothing stands out: matrix products decide, and their sizes fit."))
        return lines


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(
        title=title, title_justify="left", title_style="bold cyan", box=box.SIMPLE_HEAD, pad_edge=False
    )
