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
from castwise.lab.timing.limits import OperatorTime, Product, StepProfile, profile_steps
from castwise.lab.timing.matrix_units import cpu_units, cuda_units
from castwise.lab.timing.rates import Rate
from castwise.lab.timing.stats import Ratio, Summary
from castwise.lab.workloads.workload import Workload

TENSOR_CORES = cuda_units((8, 0))
NO_UNITS = cpu_units(frozenset({"avx512f", "avx512_bf16"}))
TIE, GAIN = Ratio(1.0, 0.9, 1.1, 0.95, 9), Ratio(1.4, 1.3, 1.5, 0.95, 9)
BF16 = Rate("matmul", "", "bf16", 400.0, speedup=Ratio(4.0, 3.9, 4.1, 0.95, 9), verdict="fast")


def operator(name, share, product=None, kind="other"):
    return OperatorTime(name, share, 1.0, product, kind)


def product(m, n, k, share=1.0, kind="matmul"):
    return operator("aten::mm", share, Product(kind, m, n, k), "matrix")


def profile(*operators, step_s=0.1, data_s=0.0, launches=100.0, launch_s=1e-6, busy_share=None):
    return StepProfile(
        Summary(step_s, step_s, step_s, 9), Summary(data_s, data_s, data_s, 9), data_s / (data_s + step_s),
        operators or (product(64, 64, 64),), launches, launch_s, busy_share,
    )  # fmt: skip


def found(*args, units=TENSOR_CORES, gain=TIE, rates=(BF16,), **kwargs):
    return findings(profile(*args, **kwargs), units, rates, lambda _product: gain)


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
    (finding,) = found(product(64, 64, 64, 0.4), operator("aten::gelu", 0.35), operator("aten::add", 0.25))
    assert finding.what == "outside matrix units"
    assert finding.measured["share"] == pytest.approx(0.6)
    assert finding.measured["most_from_faster_products"] == pytest.approx(1 / (0.6 + 0.4 / 4))
    assert "gelu 35%, add 25%" in finding.sentence
    assert found(product(64, 64, 64, 0.8), operator("aten::gelu", 0.2)) == ()


def test_a_depthwise_convolution_is_outside_and_its_size_no_matter():
    (finding,) = found(operator("aten::conv", 1.0, Product("depthwise", 0, 13, 1), "depthwise"))
    assert finding.what == "outside matrix units"


def test_sizes_that_miss_the_multiples():
    (finding,) = found(
        product(64, 13, 32, 0.5), product(32, 13, 64, 0.1), product(64, 64, 64, 0.4), gain=GAIN
    )
    assert finding.what == "size"
    assert finding.measured["n"] == 13
    assert finding.measured["share"] == pytest.approx(0.6)  # forward and backward together
    assert "13 columns (next that fits: 16)" in finding.sentence
    assert "padded it runs 1.40x as fast [1.30, 1.50]" in finding.sentence
    assert finding.advice.startswith("Round")


def test_padding_that_gains_nothing_is_not_advised():
    (finding,) = found(product(64, 13, 32))
    assert finding.advice == "Leave it: padding was measured and gains nothing here."


def test_without_matrix_units_only_a_measured_gain_counts():
    assert found(product(64, 13, 32), units=NO_UNITS, gain=TIE) == ()
    (finding,) = found(product(64, 13, 32), units=NO_UNITS, gain=GAIN)
    assert finding.what == "size"


def test_small_products_and_more_than_five_are_left_out():
    assert found(product(64, 13, 32, 0.005), product(64, 64, 64, 0.995)) == ()
    assert len(found(*(product(64, 8 * i + 1, 32, 0.1) for i in range(1, 10)))) == 5


def test_convolutions_miss_by_their_channels():
    (finding,) = found(product(0, 64, 3, kind="convolution"), gain=None)
    assert "3 input channels (next that fits: 8); not measured" in finding.sentence


def test_a_linear_of_width_13_is_caught_end_to_end():

    def stream(seed):
        while True:
            yield torch.ones(16, 32)

    job = Workload(
        "narrow",
        lambda: nn.Sequential(nn.Linear(32, 13), nn.Linear(13, 8)),
        lambda params: torch.optim.SGD(params, 1e-3),
        stream,
        lambda model, batch: model(batch).square().mean(),
    )
    seen = profile_steps(job, torch.device("cpu"), steps=3)
    said = findings(seen, TENSOR_CORES, (), lambda _product: None)
    assert any(f.what == "size" and 13 in f.measured.values() for f in said)


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
    assert next(f.what for f in findings(seen, NO_UNITS, (), lambda _product: None)) == "data"


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
