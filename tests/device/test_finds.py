"""Tests that need a device other than the CPU: its threads, its memory, its index and missing features."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import resource
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import castwise
from castwise.core.casting import frames
from castwise.core.masters.parameter import master_of
from castwise.core.plans.plan import PRESETS
from tests.device import sim
from tests.here import DEVICE

simulated = pytest.mark.skipif(
    DEVICE != "sim", reason="needs information that only the simulated device gives"
)
NAMES = [name for name in PRESETS if name != "tf32"]


def net(device: str = DEVICE) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).to(device)


def step(amp: castwise.Amp, model: nn.Module, optimizer: torch.optim.Optimizer, device: str = DEVICE) -> None:
    amp.backward(model(torch.ones(3, 8, device=device)).square().mean())
    amp.step(optimizer, max_norm=1.0)
    optimizer.zero_grad()


# --- the simulation itself ----------------------------------------------------------------------------------


def _touch(address: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    ctypes.string_at(address, 4)


@simulated
def test_memory_of_the_device_cannot_be_touched_from_the_host() -> None:
    x = torch.ones(4)
    process = multiprocessing.get_context("fork").Process(target=_touch, args=(x.data_ptr(),))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGSEGV
    assert x.tolist() == [1.0] * 4


@simulated
def test_tensors_of_two_devices_and_of_the_host_do_not_mix() -> None:
    x = torch.ones(3, device="sim:1")
    with pytest.raises(RuntimeError, match="at least two devices"):
        x + torch.ones(3, device="sim:0")
    with pytest.raises(RuntimeError, match="at least two devices"):
        x.mul_(torch.ones(3, device="cpu"))
    assert (x + torch.ones((), device="cpu")).device == x.device  # a 0-dim tensor may be on the host


@simulated
def test_a_copy_that_does_not_block_arrives_when_it_is_waited_for() -> None:
    host = torch.zeros(3, device="cpu", pin_memory=True)
    x = torch.ones(3)
    host.copy_(x, non_blocking=True)
    x.zero_()  # later in the same stream
    event = torch.Event(DEVICE)
    event.record()
    assert host.tolist() == [0.0] * 3
    event.synchronize()
    assert host.tolist() == [1.0] * 3


@simulated
def test_waits_are_counted_and_can_be_forbidden() -> None:
    x = torch.ones(3)
    before = sim.waits()
    assert x.sum().item() == 3.0
    x.nonzero()
    after = sim.waits()
    assert {kind: after[kind] - before[kind] for kind in after if after[kind] != before[kind]} == {
        sim.Wait.ITEM: 1, sim.Wait.SHAPE: 1
    }  # fmt: skip
    with sim.no_waits(), pytest.raises(RuntimeError, match="a value is read"):
        x.sum().item()


# --- threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["bf16-mixed+ops.exp=fp32", "fp16-mixed+ops.softmax=lower", "O1"])
def test_the_plan_follows_the_backward_onto_the_thread_of_the_device(plan: str) -> None:
    """Activation checkpointing recomputes under the plan on that thread, and nothing of the plan stays in force there."""
    seen: list[tuple[int, torch.dtype, torch.dtype]] = []

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            e, s = torch.exp(y), torch.softmax(y, -1)
            seen.append((threading.get_ident(), e.dtype, s.dtype))
            return (e.float() + s.float()).sin()  # needs the recomputation of everything up to the input

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        loss = model(torch.ones(2, 8)).mean()
        loss.backward() if "bf16" in plan else amp.backward(loss)
    (first, *dtypes), (second, *again) = seen
    assert first == threading.get_ident() != second
    assert again == dtypes
    assert frames.depth() == 0


# --- one of two devices -------------------------------------------------------------------------------------


def devices_of(value: Any, seen: set[int] | None = None) -> set[torch.device]:
    """Return the devices of all tensors reachable from an object, except the host."""
    seen = set() if seen is None else seen
    found: set[torch.device] = set()
    todo = [value]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, (type, str, bytes, torch.dtype)):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            if each.device.type != "cpu":
                found.add(each.device)
        elif isinstance(each, dict):
            todo += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            todo += each
        elif type(each).__module__.startswith("castwise") or isinstance(each, torch.optim.Optimizer):
            todo += gc.get_referents(each)
    return found


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("maker", ["fused", "plain"])
@pytest.mark.parametrize("plan", NAMES)
def test_all_that_a_session_keeps_is_on_the_device_of_its_model(plan: str, maker: str) -> None:
    """Flags, scales, masters and moments are on the second device while the first is current."""
    second = f"{DEVICE}:1"
    model = net(second)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4, fused=maker == "fused")
    amp = castwise.Amp(plan, device=second)
    amp.prepare(model, optimizer)
    for _ in range(3):
        step(amp, model, optimizer, second)
    assert torch.accelerator.current_device_index() == 0
    assert devices_of([amp, optimizer]) == {torch.device(second)}
    amp.close()


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("maker", ["fused", "plain"])
@pytest.mark.parametrize(
    "plan",
    ["bf16-mixed", "fp16-mixed+loss_scale.init=64", "bf16-master", "fp16-master+loss_scale.init=64", "fp32"],
)
def test_a_model_that_is_spread_over_two_devices_skips_as_one(plan: str, maker: str) -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8).to(f"{DEVICE}:0"), nn.Linear(8, 4).to(f"{DEVICE}:1")

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(self.first(x).to(f"{DEVICE}:1"))

    model = Spread()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4, fused=maker == "fused")
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    for factor in (1.0, float("inf"), 1.0):
        before = {name: value.clone() for name, value in amp.model_state_dict(model).items()}
        loss = model(torch.ones(3, 8)).square().mean()
        amp.backward(loss + factor * model.second.weight.float().sum() * 1e-3)
        assert amp.step(optimizer).skipped is (factor != 1.0)
        optimizer.zero_grad()
        after = amp.model_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before) is (factor != 1.0)
    amp.close()


# --- writes that a device's kernels do not count -------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [0.5, [0.5] * 6], ids=["one number", "a number for each"])
@pytest.mark.parametrize(
    "alias", [torch.Tensor.detach, lambda p: p, lambda p: p.data], ids=["detach", "itself", "data"]
)
def test_a_list_of_weights_that_is_interpolated_reaches_the_masters(alias: Any, numbers: Any) -> None:
    """Averages, Lookahead and target networks use such a kernel; CUDA's version does not count its writes."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with castwise.Amp("bf16-master", device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        step(amp, model, optimizer)
        low = [alias(p) for p in model.parameters()]
        with torch.no_grad():
            torch._foreach_lerp_(low, [torch.full_like(p, 2.0) for p in low], numbers)
        want = [p.detach().clone() for p in model.parameters()]
        step(amp, model, optimizer)
        assert all(map(torch.equal, want, model.parameters()))
        held = [master_of(p) for p in model.parameters()]
        assert all(torch.equal(m.to(w.dtype), w) for m, w in zip(held, want, strict=True) if m is not None)
    assert sum(m is not None for m in held) > 3


@simulated
def test_kernels_count_while_masters_are_there_and_as_torchs_do_after_it() -> None:
    def counted() -> int:
        tensor = torch.zeros(1)
        torch._foreach_lerp_([tensor], [torch.ones(1)], 0.5)
        assert tensor.item() == 0.5
        return tensor._version

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for plan, count in (("bf16-mixed", 0), ("bf16-master", 1)):
        assert counted() == 0
        with castwise.Amp(plan, device=DEVICE) as amp:
            amp.prepare(model, optimizer)
            assert counted() == count
    assert counted() == 0
    amp = castwise.Amp("bf16-master", device=DEVICE)
    amp.prepare(model, optimizer)
    del amp, model, optimizer
    gc.collect()
    assert counted() == 0
