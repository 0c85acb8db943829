"""What a doctor says of synthetic measurements, and of small workloads with a fault."""

import io
import json
import time

import pytest
import torch
from rich.console import Console
from torch import nn

from castwise.commands.jobs.doctor import _load_note, doctor, findings, verdicts
from castwise.errors import DeviceError, WorkloadError
from castwise.lab.timing.limits import OperatorTime, StepProfile, profile_steps
from castwise.lab.timing.rates import Rate
from castwise.lab.timing.stats import Ratio, Summary
from castwise.lab.workloads.workload import Workload

BF16 = Rate("matmul", "", "bf16", 400.0, speedup=Ratio(4.0, 3.9, 4.1, 0.95, 9), verdict="fast")


def operator(name, share, product=None, kind="other"):
    return OperatorTime(name, share, 1.0, product, kind)


def product(share=1.0, kind="matmul"):
    return operator("aten::mm", share, kind, "matrix")


def profile(*operators, step_s=0.1, data_s=0.0, launches=100.0, launch_s=1e-6, busy_share=None):
    return StepProfile(
        Summary(step_s, step_s, step_s, 9), Summary(data_s, data_s, data_s, 9), data_s / (data_s + step_s),
        operators or (product(),), launches, launch_s, busy_share,
    )  # fmt: skip


def found(*args, rates=(BF16,), **kwargs):
    return findings(profile(*args, **kwargs), rates)


def test_a_workload_without_limits_has_no_findings():
    assert found() == ()


def test_waiting_for_data():
    (finding,) = found(data_s=0.1)
    assert finding.what == "data"
    assert finding.measured["share"] == 0.5
    assert "a batch takes 100 ms to come, the step itself 100 ms (50%" in finding.sentence
    assert "num_workers" in finding.advice
    assert found(data_s=0.005) == ()


def test_launching_operators_on_a_cpu():
    (finding,) = found(step_s=1e-3, launches=500.0, launch_s=1e-6)
    assert finding.what == "dispatch"
    assert finding.measured["share"] == pytest.approx(0.5)
    assert finding.measured["time_per_operator_s"] == pytest.approx(2e-6)
    assert found(step_s=1e-3, launches=100.0, launch_s=1e-6) == ()


def test_an_accelerator_that_waits_for_its_host():
    (finding,) = found(busy_share=0.4)
    assert finding.what == "dispatch"
    assert "computes for 40% of a step" in finding.sentence
    assert found(busy_share=0.9, step_s=1e-3, launches=900.0) == ()


def test_time_outside_matrix_units_bounds_the_gain():
    (finding,) = found(product(0.4), operator("aten::gelu", 0.35), operator("aten::add", 0.25))
    assert finding.what == "outside matrix units"
    assert finding.measured["share"] == pytest.approx(0.6)
    assert finding.measured["most_from_faster_products"] == pytest.approx(1 / (0.6 + 0.4 / 4))
    assert "gelu 35%, add 25%" in finding.sentence
    assert found(product(0.8), operator("aten::gelu", 0.2)) == ()


def test_a_depthwise_convolution_is_outside_and_its_size_no_matter():
    (finding,) = found(operator("aten::conv", 1.0, "depthwise", "depthwise"))
    assert finding.what == "outside matrix units"


def test_verdicts_leave_the_baseline_out():
    rates = [Rate("matmul", "", "fp32", 100.0), BF16]
    assert [(v.format, v.verdict) for v in verdicts(rates, "cpu")] == [("bf16", "fast")]


def test_a_doctor_without_a_workload(examined):
    result, events = examined
    assert result.workload is None
    assert {v.format for v in result.verdicts} >= {"bf16", "fp16"}
    assert all(v.verdict in ("fast", "no gain", "avoid") and v.reason for v in result.verdicts)
    record = json.loads(result.to_json())
    assert record == result.to_dict()
    assert (record["kind"], record["version"]) == ("doctor", 1)
    stages = list(dict.fromkeys(event.stage for event in events))
    assert stages == ["rates", "bandwidth"]
    for stage in stages:
        last = [event for event in events if event.stage == stage][-1]
        assert last.done == last.total


@pytest.mark.usefixtures("rates_are_known")
def test_a_doctor_with_a_workload_prints_it():
    result = doctor("sine?size=16", small=True, device="cpu")
    assert result.workload is not None
    record = result.to_dict()["workload"]
    assert record["profile"]["outside_share"] == pytest.approx(result.workload.profile.outside_share)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(result.table())
    text = console.export_text()
    assert "What limits" in text
    assert "Profiled by itself, with nothing beside it, a" in text
    assert "Matrix units:" in text
    for finding in result.workload.findings:
        assert finding.sentence[:30] in text
        assert finding.advice


def test_a_loader_that_sleeps_is_caught_end_to_end():
    def stream(seed):
        while True:
            time.sleep(0.05)
            yield torch.ones(4, 4)

    job = Workload(
        "slow",
        lambda: nn.Linear(4, 4),
        lambda params: torch.optim.SGD(params, 1e-3),
        stream,
        lambda model, batch: model(batch).square().mean(),
    )
    seen = profile_steps(job, torch.device("cpu"), budget_s=0.0)
    assert next(f.what for f in findings(seen, ())) == "data"


def test_a_busy_machine_is_told():
    assert _load_note(0.5, 2) == ()
    (note,) = _load_note(2.2, 2)
    assert "load 2.2 on 2 cores" in note


@pytest.mark.parametrize(
    ("device", "message"),
    [("gpu", "no such kind of device; use cpu, cuda"), ("xpu", "no xpu device is available")],
)
def test_devices_that_are_not_there(device, message):
    with pytest.raises(DeviceError, match=message):
        doctor(device=device)


def test_a_workload_that_is_not_there():
    with pytest.raises(WorkloadError):
        doctor("nowhere", device="cpu")
