"""What castwise asks torch about a device, tested on a device that an extension adds."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import castwise
from castwise.commands.jobs import processes
from castwise.commands.jobs.doctor import doctor
from castwise.core import _torch, devices
from castwise.core.plans.rules import base_table
from castwise.core.session.fused import can_fuse
from castwise.errors import DeviceError
from castwise.lab.passes.isolation import undisturbed
from castwise.lab.timing.limits import profile_steps
from castwise.lab.timing.memory import measure_here
from castwise.lab.workloads.workload import find_workload
from tests.device import sim
from tests.device.test_finds import NAMES, net, step
from tests.here import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != sim.NAME, reason="names the simulated device")
LAST = torch.device(f"{sim.NAME}:1")


def test_it_has_what_castwise_uses() -> None:
    found = devices.features(LAST)
    assert (found.count, found.lacks) == (2, () if sim.HAS_FP64 else ("fp64",))
    assert devices.accelerator() == sim.NAME
    assert devices.choices() == "cpu or sim, or sim:0 to sim:1"


@pytest.mark.parametrize("name", ["sim", "sim:1", "privateuseone"])
def test_autocast_takes_its_name(name: str) -> None:
    for region in (castwise.autocast(name), castwise.autocast("bf16", device_type=name)):
        assert region.device == sim.NAME
    x = torch.ones(3, 3, device=DEVICE)
    with castwise.autocast(name, dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        assert x.exp().dtype is torch.float32


def test_its_native_table_is_what_it_has_registered() -> None:
    names = _torch.dispatcher.autocast_registrations(sim.NAME)
    registered = {name.removeprefix("aten::").partition(".")[0] for name in names}
    listed = base_table("native", sim.NAME).keys()
    assert registered & base_table("native", "xpu").keys() <= listed <= registered


def test_random_numbers_of_all_its_devices_are_restored() -> None:
    where = [torch.device("cpu"), *(torch.device(sim.NAME, index) for index in range(sim.COUNT))]
    with undisturbed():
        inside = [torch.rand(4, device=one) for one in where]
    for one, drawn in zip(where, inside, strict=True):
        assert torch.equal(torch.rand(4, device=one), drawn)


def test_optimizers_that_it_has_kernels_for_are_fused() -> None:
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        assert can_fuse(kind(net().parameters(), 0.01))


def test_memory_is_counted() -> None:
    found = measure_here(
        find_workload("digits"), castwise.Plan.preset("bf16-mixed"), LAST, 0, inference=False
    )
    assert found.method == "max_memory_allocated"
    assert found.training_peak_bytes is not None
    assert found.training_peak_bytes > found.saved_bytes > 0


def test_a_profiler_that_does_not_time_it_leaves_the_times_of_the_host() -> None:
    profile = profile_steps(find_workload("digits"), LAST, steps=3, budget_s=0.1)
    assert profile.busy_share is None
    assert sum(operator.share for operator in profile.operators) == pytest.approx(1.0)


def test_doctor_tells_what_it_found() -> None:
    result = doctor(device=LAST, small=True)
    assert result.environment.device == "simulated accelerator"
    record = json.loads(result.to_json())
    assert record["features"]["count"] == sim.COUNT
    assert {"autocast kernels", "events", "memory statistics"} <= {*record["features"]["has"]}
    assert {grade.format for grade in result.grades} == {"bf16", "fp16"}


@pytest.fixture
def without_events(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Event:
        def __init__(self, *_: object) -> None:
            raise RuntimeError("this backend has no events")

    devices._has_events.cache_clear()
    monkeypatch.setattr(torch, "Event", Event)
    yield
    devices._has_events.cache_clear()


@pytest.mark.usefixtures("without_events")
@pytest.mark.parametrize("plan", NAMES)
def test_without_events_the_host_waits_and_is_right(plan: str) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4, fused=True)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        amp.backward(model(torch.ones(3, 8, device=DEVICE)).square().mean())
        with pytest.warns(UserWarning, match="torch has no events for sim devices, so the host waits"):
            assert not amp.step(optimizer).skipped
        optimizer.zero_grad()
        amp.backward(model(torch.full((3, 8), torch.inf, device=DEVICE)).square().mean())
        assert amp.step(optimizer).skipped
        optimizer.zero_grad()
        step(amp, model, optimizer)  # the warning is not repeated


def test_it_lacks_formats_and_devices_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="there are only 2, counted from 0; use a lower index"):
        castwise.Amp("fp32", device="sim:2")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        DeviceError, match="process 2 of this machine needs a sim device of its own, but the machine has 2"
    ):
        processes._own_device(torch.device(sim.NAME), "train")
    monkeypatch.setattr(torch.sim, "get_amp_supported_dtype", lambda: [torch.float16])  # type: ignore[attr-defined]
    with pytest.raises(
        DeviceError, match=r"sim \(simulated accelerator\) does not compute in bf16; use fp16 instead"
    ):
        castwise.Amp("bf16-true", device=LAST)


def test_compiling_for_it_is_refused_before_anything_changes() -> None:
    model = net()
    amp = castwise.Amp(castwise.Plan(compute="bf16", compile="default"), device=DEVICE)
    with pytest.raises(
        DeviceError, match="its extension has not registered it with Inductor; use compile='as_given'"
    ):
        amp.prepare(model)
    assert castwise.Amp.of(model) is None


def test_data_of_parameters_with_masters() -> None:
    model = nn.Linear(4, 4).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with castwise.Amp("bf16-master", device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        model.weight.data.fill_(2.0)
        amp.backward(model(torch.zeros(2, 4, device=DEVICE)).mean())
        amp.step(optimizer)
        assert torch.equal(model.weight, torch.full_like(model.weight, 2.0))
