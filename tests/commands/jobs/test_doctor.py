"""``doctor`` on synthetic measurements and on small workloads with a fault."""

import io
import json
import time

import pytest
import torch
from rich.console import Console
from torch import nn

from castwise.commands.jobs.doctor import _load_note, bottlenecks, by_operators, doctor, grades, step_rates
from castwise.errors import DeviceError, WorkloadError
from castwise.lab.timing.limits import OperatorTime, StepProfile, profile_steps
from castwise.lab.timing.rates import Rate, grade_of
from castwise.lab.timing.stats import Ratio, Summary
from castwise.lab.workloads.workload import Workload

BF16 = Rate("matmul", "", "bf16", 400.0, speedup=Ratio(4.0, 3.9, 4.1, 0.95, 9), grade="fast")


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
    return bottlenecks(profile(*args, **kwargs), rates)


def test_a_workload_without_limits_has_no_findings():
    assert found() == ()


def test_waiting_for_data():
    (finding,) = found(data_s=0.1)
    assert finding.what == "data"
    assert finding.measured["share"] == 0.5
    assert "a batch takes 100 ms to arrive, the step itself 100 ms (50%" in finding.sentence
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


def test_grades_leave_the_baseline_out():
    rates = [Rate("matmul", "", "fp32", 100.0), BF16]
    assert [(v.format, v.grade) for v in grades(rates, "cpu")] == [("bf16", "fast")]


def test_a_doctor_without_a_workload(examined):
    result, events = examined
    assert result.workload is None
    assert {v.format for v in result.grades} >= {"bf16", "fp16"}
    assert all(v.grade in ("fast", "no gain", "avoid") and v.reason for v in result.grades)
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
    assert "Measured alone, a training step" in text
    assert "Matrix units:" in text
    for finding in result.workload.bottlenecks:
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
    assert next(f.what for f in bottlenecks(seen, ())) == "data"


def test_a_busy_machine_is_told():
    assert _load_note(0.5, 2) == ()
    (note,) = _load_note(2.2, 2)
    assert "load 2.2 on 2 cores" in note


@pytest.mark.parametrize(
    ("device", "message"),
    [("gpu", "torch knows no such device here; allowed: cpu"), ("xpu", "no xpu device is available")],
)
def test_devices_that_are_not_there(device, message):
    with pytest.raises(DeviceError, match=message):
        doctor(device=device)


def test_a_workload_that_is_not_there():
    with pytest.raises(WorkloadError):
        doctor("nowhere", device="cpu")


def rate(kernel, speedup):
    return Rate(kernel, "", "fp16", 1.0, speedup=Ratio(speedup, speedup, speedup, 0.95, 9))


def test_operators_say_how_slow_a_step_is_at_least():
    seen = profile(
        operator("aten::mm", 0.5, "matmul"),
        operator("aten::convolution", 0.3, "convolution"),
        operator("aten::gelu", 0.2),
    )
    rates = (rate("matmul", 0.01), rate("conv3x3", 0.1), rate("conv1x1", 0.5))
    assert by_operators(seen, rates, "fp16-mixed") == pytest.approx(0.5 / 0.01 + 0.3 / 0.5 + 0.2)
    assert by_operators(seen, rates, "bf16-mixed") == pytest.approx(1.0)


class SlowInLow(nn.Linear):
    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            time.sleep(0.05)
        return super().forward(x)


class BreaksInLow(nn.Linear):
    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise NotImplementedError("no kernel for bf16")
        return super().forward(x)


def batches(seed):
    while True:
        yield torch.ones(4, 8)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.Linear, ""),
        (SlowInLow, "x slower than fp32"),
        (BreaksInLow, "no kernel for bf16"),
    ],
)
def test_steps_of_each_format_and_their_grades(layer, said):
    job = Workload(
        "job", lambda: layer(8, 8), lambda params: torch.optim.SGD(params, lr=1e-3), batches,
        lambda model, batch: model(batch).square().mean(),
    )  # fmt: skip
    base, low, fp16 = step_rates(
        job, torch.device("cpu"), {"fp16-mixed": "not asked for"}, 0, 1, lambda _event: None
    )
    assert (base.plan, low.plan, fp16.plan) == ("fp32", "bf16-mixed", "fp16-mixed")
    assert (base.speedup, base.grade) == (None, None)
    assert base.time is not None
    assert (fp16.grade, fp16.reason, fp16.time) == ("avoid", "not asked for", None)
    assert said in low.reason
    if said:
        assert (low.time, low.speedup, low.grade) == (None, None, "avoid")
    else:
        assert low.speedup.n == 1  # n counts starts, not rounds
        assert low.grade == grade_of(low.speedup)


@pytest.mark.parametrize(
    ("low", "high", "grade"),
    [
        (1.01, 1.2, "fast"),
        (0.93, 0.97, "no gain"),
        (0.95, 1.01, "no gain"),
        (0.85, 0.95, "no gain"),
        (0.5, 0.89, "avoid"),
    ],
)
def test_grades_go_by_the_interval(low, high, grade):
    assert grade_of(Ratio((low + high) / 2, low, high, 0.95, 9)) == grade
