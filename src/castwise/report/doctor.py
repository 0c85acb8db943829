"""What a doctor found, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from castwise.report import words
from castwise.report.grids import Grid, Row, terminal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = ["doctor_table"]

Record = Mapping[str, Any]


def doctor_table(record: Record) -> RenderableType:
    """A device, and perhaps a workload on it, for ``rich.print``; readable from 80 columns on.

    Args:
        record: As ``DoctorResult.to_dict`` gives it.

    Returns:
        Something rich can print.
    """
    from rich.console import Group
    from rich.text import Text

    where, band = record["environment"], record["bandwidth"]
    device = f"{where['device']} ({where['device_type']}, {where['threads']} threads, torch {where['torch']})"
    quartiles = f"{band['gb_per_s_low']:.3g} to {band['gb_per_s_high']:.3g}"
    return Group(
        Text(device, style="bold"),
        Text(f"Matrix units: {record['units']['sentence']}"),
        Text(f"Memory: {band['gb_per_s']:.3g} GB/s (quartiles {quartiles})"),
        Text(),
        terminal(_rates(record["rates"])),
        terminal(_verdicts(record["verdicts"])),
        *(_workload(record["workload"]) if record["workload"] is not None else ()),
        *(Text(note, style="yellow") for note in record["notes"]),
    )


def _rates(rates: list[Record]) -> Grid:
    rows, last = [], ""
    for rate in rates:
        speed = "-" if rate["gflops"] is None else f"{rate['gflops']:,.3g}"
        if rate["gflops_low"] is not None and rate["gflops_high"] is not None:
            speed += f" ({rate['gflops_low']:,.3g} to {rate['gflops_high']:,.3g})"
        ratio = "{value:.2g}x [{low:.2g}, {high:.2g}]".format(**rate["speedup"]) if rate["speedup"] else ""
        said = rate["error"] or (rate["verdict"] or "") + (", small probe" if rate["probe"] else "")
        operator = "" if rate["kernel"] == last else rate["kernel"]
        last = rate["kernel"]
        rows.append(
            Row((operator, rate["format"], speed, ratio, said), "avoid" if rate["verdict"] == "avoid" else "")
        )
    header = ("operator", "format", "GFLOP/s", "ratio", "verdict")
    return Grid("Measured rates, GFLOP/s (quartiles) and ratio to fp32 [interval]", header, tuple(rows))


def _verdicts(verdicts: list[Record]) -> Grid:
    rows = []
    for said in verdicts:
        apart = f", not in {words.listed(said['avoid_in'])}" if said["avoid_in"] else ""
        rows.append(Row((said["format"], said["verdict"] + apart, said["reason"]), said["verdict"]))
    return Grid("Formats on this device", ("format", "verdict", "why"), tuple(rows))


def _workload(report: Record) -> list[Text]:
    from rich.text import Text

    profile = report["profile"]
    median, low, high = (words.time(profile["step_s"][key]) for key in ("median_s", "q1_s", "q3_s"))
    lines = [
        Text(f"What limits {report['name']} in fp32", style="bold cyan"),
        Text(
            f"A training step takes {median} (quartiles {low} to {high}), a batch "
            f"{words.time(profile['data_s']['median_s'])} to come; {profile['launches']:.0f} operators per step, "
            f"{1 - profile['outside_share']:.0%} of their time in matrix products and convolutions."
        ),
    ]
    for finding in report["findings"]:
        lines += [Text(f"- {finding['sentence']}", style="yellow"), Text(f"  {finding['advice']}")]
    if not report["findings"]:
        lines.append(Text("Nothing stands out: matrix products decide, and their sizes fit."))
    return lines
