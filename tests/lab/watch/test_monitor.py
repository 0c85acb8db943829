"""A monitor reports what happens in training and leaves the training unchanged."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import json
import math
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import castwise
from castwise.errors import CheckpointError, PlanError, UnknownNameError, WorkloadError
from castwise.lab.watch import Alarm, Line, Monitor
from castwise.lab.watch.statistics import _Ear
from castwise.report.monitor import answer
from tests.here import DEVICE
from tests.lab.watch.jobs import OPTIMIZERS, batches, generators, loss, model, same, train
from tests.soak import every, pairs

PLANS = ["fp32", "bf16-mixed", "fp16-mixed", "bf16-master", "fp16-master", "bf16-true", "fp16-true", "O2"]


def hooks_of(net: nn.Module) -> list[int]:
    return [len(vars(m)["_forward_hooks"]) + len(vars(m)["_forward_pre_hooks"]) for m in net.modules()]


# --- training is unchanged ------------------------------------------------------------------------------------


@every(2, 1)
@pytest.mark.parametrize(("optimizer", "plan"), [(o, p) for p, o in pairs(PLANS, OPTIMIZERS, each=2)])
def test_the_training_does_not_notice(optimizer: str, plan: str, tmp_path: Path) -> None:
    ends = []
    for watched in (False, True):
        net = model()
        made = OPTIMIZERS[optimizer](net.parameters())
        torch.manual_seed(7)
        amp = castwise.Amp(plan)
        net, made = amp.prepare(net, made)
        if watched:
            how: Any = {"loss": loss, "batches": batches(seed=5), "audit_every": 4}
            before = hooks_of(net)
            monitor = Monitor(amp, every=1, jsonl=tmp_path / "lines", log=lambda values, step: None, **how)
        train(amp, net, made, 6, poison=[3])
        grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        modes = [module.training for module in net.modules()]
        if watched:
            monitor.close()
            assert hooks_of(net) == before
            assert monitor.step == 6
            assert len(monitor.samples) == 6
            assert len(monitor.audits) == 2
            finite = all(bool(p.isfinite().all()) for p in net.parameters())
            assert monitor.report().unseen == () or not finite  # fp16-true may have lost its weights
        ends.append((net.state_dict(), made.state_dict(), amp.state_dict(), grads, modes, generators()))
    assert same(*ends)


def test_a_monitor_that_draws_random_numbers_would_be_caught() -> None:
    """The comparison above detects a single random draw."""
    before = generators()
    torch.rand(1)
    assert not same(before, generators())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = model(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return checkpoint(self.part, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    ends = []
    for watched in (False, True):
        net = Checkpointed(reentrant)
        made = torch.optim.AdamW(net.parameters(), 1e-2)
        torch.manual_seed(7)
        amp = castwise.Amp("fp16-mixed")
        amp.prepare(net, made)
        monitor = Monitor(amp, every=1) if watched else None
        train(amp, net, made, 4)
        ends.append((net.state_dict(), made.state_dict(), generators()))
        if monitor is not None:
            region = next(r for r in monitor.samples[-1].regions if r.path == "part.0")
            assert region.output is not None
            assert region.zero is not None
    assert same(*ends)


def test_a_model_is_copied_and_pickled_without_the_ears() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 0.1)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    monitor = Monitor(amp, every=1)
    train(amp, net, made, 1)
    assert hooks_of(net) != hooks_of(model())
    twin = copy.deepcopy(net)
    again = pickle.loads(pickle.dumps(net))
    for one in (twin, again):
        assert not [
            h for m in one.modules() for h in vars(m)["_forward_hooks"].values() if isinstance(h, _Ear)
        ]
        one(batches()[0][0])
    train(amp, net, made, 1)
    assert monitor.samples[-1].regions[0].output is not None


# --- values reported ------------------------------------------------------------------------------------------


def test_figures_are_those_of_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model(dropout=0.0)
    made = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    amp = castwise.Amp("fp32")
    amp.prepare(net, made)
    monitor = Monitor(amp, every=1)
    outputs: dict[str, float] = {}
    for path, module in net.named_modules():
        module.register_forward_hook(
            lambda m, a, out, path=path: outputs.__setitem__(path, float(out.detach().abs().max()))
        )
    data = batches()
    for step in range(3):
        made.zero_grad()
        amp.backward(loss(net, data[step]))
        before = {n: p.detach().double().clone() for n, p in net.named_parameters()}
        grads = {n: p.grad.double() for n, p in net.named_parameters() if p.grad is not None}
        amp.step(made)
        after = {n: p.detach().double() for n, p in net.named_parameters()}
        sample = monitor.samples[-1]
        assert sample.step == step + 1
        for region in sample.regions:
            own = [n for n in before if n.rpartition(".")[0] == region.path]

            def norm(values: dict[str, Tensor], own: list[str] = own) -> float:
                return math.sqrt(sum(float(values[n].square().sum()) for n in own))

            moved = norm({n: after[n] - before[n] for n in own})
            assert region.grad_norm == pytest.approx(norm(grads), rel=1e-5)
            assert region.weight_norm == pytest.approx(norm(before), rel=1e-5)
            assert region.update_ratio == pytest.approx(moved / norm(before), rel=1e-4)
            assert region.output == (outputs[region.path] if step else None)
        assert sample.grad_norm == pytest.approx(
            math.sqrt(sum(float(g.square().sum()) for g in grads.values())), rel=1e-5
        )


def test_large_parameters_are_sampled_and_scaled_up() -> None:
    from castwise.lab.watch import statistics

    torch.manual_seed(0)
    net = nn.Linear(700, 300, bias=False)
    assert net.weight.numel() > 4 * statistics.ELEMENTS
    made = torch.optim.SGD(net.parameters(), 0.1)
    amp = castwise.Amp("fp32")
    amp.prepare(net, made)
    monitor = Monitor(amp, every=1)
    amp.backward(net(torch.randn(8, 700)).square().mean())
    before = net.weight.detach().clone()
    amp.step(made)
    exact = float((net.weight.detach() - before).norm() / before.norm())
    assert monitor.samples[-1].update_ratio == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-master", "bf16-master"])
def test_gradients_and_updates_are_those_of_the_masters_unscaled(plan: str, fused: bool) -> None:
    figures = {}
    for name in ("fp32", plan):
        net = model(dropout=0.0)
        made = torch.optim.SGD(net.parameters(), 0.01, fused=fused)
        amp = castwise.Amp(castwise.Plan.parse(name + ("+loss_scale.init=1024" if "fp16" in name else "")))
        amp.prepare(net, made)
        monitor = Monitor(amp, every=1)
        train(amp, net, made, 2)
        figures[name] = monitor.samples[-1]
        if "fp16" in name:
            assert figures[name].loss_scale == 1024.0
        amp.close()
    one, other = figures.values()
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=0.03)
    for mine, theirs in zip(one.regions, other.regions, strict=True):
        assert mine.path == theirs.path
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=0.1, abs=1e-3)
        assert mine.update_ratio == pytest.approx(theirs.update_ratio, rel=0.1, abs=1e-5)


def test_shares_of_gradients_that_underflow_are_exact() -> None:
    """The gradient of an fp16 output is set by hand: a quarter zero, a quarter subnormal, the rest normal."""

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            values = torch.tensor([0.0, 2.0**-20, 2.0**-10, 1.0], dtype=torch.float16)
            return values.repeat(grads[0].numel() // 4).view_as(grads[0])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return Given.apply(self.layer(x))

    net = Net()
    made = torch.optim.SGD(net.parameters(), 0.1)
    amp = castwise.Amp("fp16-mixed")
    amp.prepare(net, made)
    monitor = Monitor(amp, every=1)
    for _ in range(2):
        made.zero_grad()
        amp.backward(net(torch.full((4, 8), 1e4)).float().sum())
        amp.step(made)
    (region,) = [r for r in monitor.samples[-1].regions if r.path == "layer"]
    assert region.zero == 0.25
    assert region.subnormal == 0.25
    energy = 8 * (2.0**-40 + 2.0**-20 + 1.0)
    assert region.underflow == pytest.approx(16 * 2.0**-48 / 12 / energy, rel=1e-3)
    weight = net.layer.weight
    assert region.near_overflow is not None
    assert 0.0 <= region.near_overflow <= 1.0
    assert weight.grad is not None


def test_updates_that_rounding_drops_come_by_region() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4))
    made = torch.optim.SGD([
        {"params": net[0].parameters(), "lr": 1e-5}, {"params": net[1].parameters(), "lr": 1e-2}
    ], lr=1.0)  # fmt: skip
    amp = castwise.Amp("bf16-true")
    amp.prepare(net, made)
    seen: list[Alarm] = []
    monitor = Monitor(amp, every=4, on_alarm=seen.append)
    for _ in range(4):
        made.zero_grad()
        amp.backward(net(torch.randn(8, 32)).float().square().mean())
        amp.step(made)
    lost = {r.path: r.lost_updates for r in monitor.samples[-1].regions}
    assert lost["0"] is not None
    assert lost["1"] is not None
    assert lost["0"] > 0.99
    assert lost["1"] < 0.2
    assert "lost_updates" in {alarm.kind for alarm in seen}


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "fp16-master"])
def test_skipped_steps_are_counted_whoever_steps(plan: str, by_hand: bool) -> None:
    net = model()
    made = torch.optim.AdamW(net.parameters(), 1e-2)
    amp = castwise.Amp(plan + ("+loss_scale.init=1024" if "fp16" in plan else ""))
    monitor = Monitor(amp, every=1)  # before prepare
    amp.prepare(net, made)
    train(amp, net, made, 6, poison=[2, 5], by_hand=by_hand)
    assert monitor.step == 6
    assert [s.step for s in monitor.samples if s.skipped] == [2, 5]
    assert monitor.report().skipped_steps == 2


def test_buffers_that_were_put_back_are_in_the_report() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    amp, made = castwise.Amp("bf16-mixed"), torch.optim.SGD(net.parameters(), 0.1)
    amp.prepare(net, made)
    with Monitor(amp) as monitor:
        for number in (1.0, float("nan"), float("nan")):
            amp.backward(net(number * torch.randn(8, 4)).sum())
            made.step() if monitor.step == 1 else amp.step(made)
            made.zero_grad()
        report = monitor.report()
        assert report.restored_buffers == (("0.running_mean", 2), ("0.running_var", 2))
        assert "2 skipped, buffers restored after skipped steps: 0.running_mean, 0.running_var; " in answer(
            report.to_dict()
        )


def test_a_plain_step_without_anything_of_castwise_in_the_loop() -> None:
    net = model()
    made = torch.optim.AdamW(net.parameters(), 1e-2)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    monitor = Monitor(amp, every=1)
    for batch in batches()[:3]:
        made.zero_grad()
        loss(net, batch).backward()
        made.step()
    assert [s.skipped for s in monitor.samples] == [False] * 3
    assert monitor.samples[-1].grad_norm


def test_accumulation_is_one_step() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    monitor = Monitor(amp, every=1)
    train(amp, net, made, 3, accumulate=4)
    assert monitor.step == 3
    assert len(monitor.samples) == 3


def test_several_optimizers_and_losses() -> None:
    one, two = model(0), model(1)
    first, second = torch.optim.SGD(one.parameters(), 1e-2), torch.optim.AdamW(two.parameters(), 1e-3)
    amp = castwise.Amp("fp16-mixed+loss_scale.init=256")
    amp.prepare(one, first)
    amp.prepare(two, second)
    monitor = Monitor(amp, every=1)
    for batch in batches()[:3]:
        first.zero_grad()
        second.zero_grad()
        amp.backward(loss(one, batch), name="a")
        amp.backward(loss(two, batch), name="b")
        amp.step(first, second, max_norm=1.0)
        second.zero_grad()
        amp.backward(loss(two, batch), name="b")
        amp.step(second)
    assert monitor.step == 6
    assert [(s.optimizer, s.step) for s in monitor.samples][:3] == [(0, 1), (1, 1), (1, 2)]
    assert {r.path for r in monitor.samples[-1].regions if r.grad_norm is not None} == {
        "1:0", "1:1", "1:4", "1:5", "1:6"
    }  # fmt: skip
    assert "optimizer1/1:0/grad_norm" in monitor.samples[-1].scalars()


def test_a_parameter_that_joins_later() -> None:
    net = model()
    made = torch.optim.SGD(net[0].parameters(), 1e-2)
    amp = castwise.Amp("bf16-master")
    for part in list(net)[1:]:
        part.requires_grad_(False)
    amp.prepare(net, made)
    monitor = Monitor(amp, every=1)
    train(amp, net, made, 1)
    net[6].requires_grad_(True)
    made.add_param_group({"params": net[6].parameters()})
    train(amp, net, made, 1)
    assert {r.path for r in monitor.samples[-1].regions if r.grad_norm is not None} == {"0", "6"}


def test_a_model_that_is_closed_and_prepared_again_goes_on() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("bf16-master")
    amp.prepare(net, made)
    plain = hooks_of(model())
    monitor = Monitor(amp, every=1)
    train(amp, net, made, 2)
    amp.close()
    assert hooks_of(net) == plain
    made.zero_grad()
    loss(net, batches()[0]).backward()
    made.step()  # a step outside the session
    assert monitor.step == 2
    amp.prepare(net, made)
    train(amp, net, made, 2)
    assert monitor.step == 4
    assert monitor.samples[-1].regions[0].output is not None
    monitor.close()
    train(amp, net, made, 1)
    assert monitor.step == 4
    monitor.close()


def test_two_monitors_see_the_same() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("bf16-true")
    amp.prepare(net, made)
    with Monitor(amp, every=1) as one, Monitor(amp, every=1) as two:
        train(amp, net, made, 4)
    assert list(one.samples) == list(two.samples)


def test_it_lives_as_long_as_the_session_and_no_longer() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    seen: list[int] = []
    Monitor(amp, every=1, log=lambda values, step: seen.append(step))  # no reference is kept
    gc.collect()
    train(amp, net, made, 2)
    assert seen == [1, 2]
    session, whole = weakref.ref(amp), weakref.ref(net)
    del amp, net, made
    gc.collect()
    assert session() is None
    assert whole() is None


def compiled() -> tuple[castwise.Amp, Any, torch.optim.Optimizer, list[int]]:
    """Return a session, its compiled model, its optimizer, and a list with one entry per compiled graph."""
    net = model(dropout=0.0)
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    compiles: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(1)
        return graph.forward

    fast = torch.compile(net, backend=backend)
    return amp, fast, made, compiles


def test_compiled_modules_are_not_seen_and_not_compiled_again(tmp_path: Path) -> None:
    amp, fast, made, compiles = compiled()
    train(amp, fast, made, 2)
    count = len(compiles)
    with Monitor(amp, every=1) as monitor:
        train(amp, fast, made, 4)
    train(amp, fast, made, 1)
    assert len(compiles) == count
    assert monitor.samples[-1].grad_norm
    assert any("torch.compile" in what for what in monitor.report().unseen)


def test_a_monitor_that_is_there_when_a_model_is_compiled() -> None:
    amp, fast, made, compiles = compiled()
    with Monitor(amp, every=1):
        train(amp, fast, made, 4)
    train(amp, fast, made, 1)
    assert len(compiles) == 1


# --- errors ---------------------------------------------------------------------------------------------------


class Stop(Exception):
    """An exception of the user's."""


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_what_on_alarm_raises_ends_the_loop_and_the_session_is_whole(plan: str, by_hand: bool) -> None:
    def stop(alarm: Alarm) -> None:
        raise Stop(alarm.kind)

    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp(plan)
    amp.prepare(net, made)
    lines = {"skipped_in_a_row": Line(0.5, 0.25)}
    with (
        pytest.raises(Stop, match="skipped_in_a_row"),
        Monitor(amp, every=1, lines=lines, on_alarm=stop) as monitor,
    ):
        train(amp, net, made, 9, poison=[3], by_hand=by_hand)
    assert monitor.step == 3
    train(amp, net, made, 3)  # training continues normally
    amp.close()
    assert hooks_of(net) == hooks_of(model())


def test_an_interrupt_inside_the_loop_leaves_nothing_behind() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    before = hooks_of(net)

    def interrupt(step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Monitor(amp, every=1) as monitor:
        train(amp, net, made, 5, after=interrupt)
    assert hooks_of(net) == before
    assert monitor.step == 2


def test_a_failing_optimizer_step_does_not_confuse_it() -> None:
    net = model()

    class Odd(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise Stop
            return super().step(closure)

    made = Odd(net.parameters(), 1e-2)
    amp = castwise.Amp("fp16-mixed+loss_scale.init=8")
    amp.prepare(net, made)
    monitor = Monitor(amp, every=1)
    train(amp, net, made, 1)
    made.fails = True
    with pytest.raises(Stop):
        train(amp, net, made, 1)
    made.fails = False
    train(amp, net, made, 2)
    assert monitor.step == 3
    assert [s.skipped for s in monitor.samples] == [False] * 3


def test_what_a_logger_raises_is_a_warning_once() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)

    def log(values: dict[str, float], step: int) -> None:
        raise Stop("no network")

    monitor = Monitor(amp, every=1, log=log)
    with pytest.warns(UserWarning, match="log= failed .Stop: no network.; training and the monitor continue"):
        train(amp, net, made, 3)
    assert len(monitor.samples) == 3


def test_something_that_cannot_be_looked_at_is_said() -> None:
    """The output is of a tensor subclass that refuses the monitor's operator."""

    class Odd(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.aminmax:
                raise TypeError("not that")
            return super().__torch_function__(func, types, args, kwargs or {})

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).as_subclass(Odd)  # type: ignore[no-any-return]

    net = Net(4, 4)
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("fp32")
    amp.prepare(net, made)
    monitor = Monitor(amp, every=1)
    for _ in range(2):
        amp.backward(net(torch.randn(2, 4)).as_subclass(Tensor).square().mean())
        amp.step(made)
    assert monitor.samples[-1].grad_norm
    assert any("not that" in what for what in monitor.report().unseen)


# --- alarms in a run ------------------------------------------------------------------------------------------


def test_skips_in_a_row_name_the_module_and_are_told_once() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("fp16-mixed+loss_scale.init=64", patience=50)
    amp.prepare(net, made)
    seen: list[Alarm] = []
    monitor = Monitor(amp, on_alarm=seen.append)
    train(amp, net, made, 12, poison=range(4, 11))
    (alarm,) = [a for a in seen if a.kind == "skipped_in_a_row"]
    assert alarm.step == 8
    assert alarm.value == 5.0
    assert "5 steps in a row were skipped" in alarm.message
    assert " in 0, 1, 4 and" in alarm.message
    assert "skipped_in_a_row" not in {a.kind for a in monitor.open_alarms}
    assert dataclasses.replace(alarm) in monitor.alarms


def test_a_scale_that_is_sought_at_the_start_is_no_alarm() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("fp16-mixed", patience=50)
    amp.prepare(net, made)
    monitor = Monitor(amp)
    train(amp, net, made, 12, poison=range(1, 9))
    assert not monitor.alarms


def test_a_scale_that_falls_is_an_alarm_at_the_step() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp(castwise.Plan(compute="fp16", loss_scale=castwise.LossScale(init=8.0)), patience=50)
    amp.prepare(net, made)
    seen: list[Alarm] = []
    Monitor(amp, every=1000, on_alarm=seen.append)
    train(amp, net, made, 7, poison=range(3, 8))
    fallen = next(a for a in seen if a.kind == "loss_scale")
    assert fallen.step == 6
    assert fallen.value == 0.5


def test_nonfinite_outputs_of_a_made_step() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.odd = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.odd(x * 1e38).detach().clamp(-1, 1).nan_to_num()  # type: ignore[no-any-return]

    net = Masked()
    made = torch.optim.SGD(net.layer.parameters(), 1e-2)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    seen: list[Alarm] = []
    Monitor(amp, every=1, on_alarm=seen.append, lines={"update_ratio": None})
    for _ in range(3):
        amp.backward(net(torch.full((2, 4), 100.0)).square().mean())
        amp.step(made)
    assert [(a.kind, a.region) for a in seen] == [("nonfinite", "odd")]


def test_an_output_near_overflow_in_fp16() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-6)
    amp = castwise.Amp("fp16-mixed")
    with torch.no_grad():
        net[4].bias.fill_(20000.0)
    amp.prepare(net, made)
    seen: list[Alarm] = []
    Monitor(amp, every=1, on_alarm=seen.append, lines={"update_ratio": None})
    train(amp, net, made, 2)
    (alarm,) = seen
    assert (alarm.kind, alarm.region) == ("near_overflow", "4")
    assert "outputs of 4 reach 31% of fp16's largest number" in alarm.message
    assert "Region('4', compute='fp32')" in alarm.message


def test_small_gradients_underflow_at_a_small_scale_and_not_at_a_large_one() -> None:
    for scale, expected in ((2.0**-10, {"underflow", "loss_scale"}), (2.0**14, set())):
        net = model(dropout=0.0)
        made = torch.optim.SGD(net.parameters(), 1e-3)
        amp = castwise.Amp(f"fp16-mixed+loss_scale.init={scale}")
        amp.prepare(net, made)
        monitor = Monitor(amp, every=1)
        for batch in batches()[:4]:
            made.zero_grad()
            amp.backward(loss(net, batch) * 1e-3)
            amp.step(made)
        assert {a.kind for a in monitor.alarms} == expected
        amp.close()


# --- state and arguments --------------------------------------------------------------------------------------


def test_a_resumed_run_counts_on() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("bf16-mixed", patience=50)
    amp.prepare(net, made)
    first = Monitor(amp, every=3)
    train(amp, net, made, 10, poison=range(5, 11))
    assert first.open_alarms
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    second = Monitor(amp, every=3)
    second.load_state_dict(state)
    assert second.open_alarms == first.open_alarms
    train(amp, net, made, 2, poison=[1])
    assert second.step == 12
    assert [s.step for s in second.samples] == [12]
    assert not second.alarms  # the alarm was raised before the state was saved
    with pytest.raises(CheckpointError, match=r"not the state_dict\(\) of a Monitor"):
        second.load_state_dict({"version": 1})


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"every": 0}, PlanError, r"Monitor\(every=0\): needs a whole number >= 1"),
        ({"every": 2.0}, PlanError, r"every=2.0"),
        ({"audit_every": -1}, PlanError, "audit_every=-1"),
        ({"accumulate": True}, PlanError, "accumulate=True"),
        ({"on_alarm": 3}, PlanError, r"on_alarm=3\): needs a function"),
        ({"log": 3}, PlanError, r"log=3\): needs a function log\(values, step\)"),
        ({"loss": loss}, PlanError, "an audit needs batches= too"),
        ({"batches": []}, PlanError, "an audit needs loss= too"),
        ({"loss": 3, "batches": [1]}, PlanError, r"loss=3\): needs a function loss\(model, batch\)"),
        ({"lines": {"nothing": None}}, UnknownNameError, "no alarm 'nothing'; allowed: skipped_in_a_row"),
        ({"lines": {"audit": 3.0}}, PlanError, r"'audit': 3.0}\): needs castwise.lab.watch.Line"),
        ({"lines": 3}, PlanError, "lines=3"),
        ({"jsonl": "/dev/null/x"}, PlanError, r"jsonl='/dev/null/x'\): cannot be written"),
        ({"tensorboard": 3}, PlanError, r"tensorboard=3\): give a folder"),
    ],
)
def test_arguments_that_cannot_be(how: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Monitor(castwise.Amp("fp32"), **how)


def test_it_takes_a_session() -> None:
    with pytest.raises(PlanError, match=r"Monitor\(Linear\): needs a castwise.Amp, the session to monitor"):
        Monitor(nn.Linear(1, 1))  # type: ignore[arg-type]


# --- the report -----------------------------------------------------------------------------------------------


def test_the_report_as_table_json_and_page(tmp_path: Path) -> None:
    from rich.console import Console

    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("fp16-mixed+loss_scale.init=1024", patience=50)
    amp.prepare(net, made)
    with Monitor(amp, every=2, loss=loss, batches=batches(), audit_every=50) as monitor:
        train(amp, net, made, 20, poison=range(10, 16))
        train(amp, net, made, 8, poison=range(3, 9))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(monitor.table())
    said = console.export_text()
    assert "fp16-mixed; loss scale from 1024: 28 steps, 12 skipped" in said
    assert "ALARM skipped_in_a_row at step 27" in said
    assert "Audit at step 1: pass" in said
    record = monitor.to_dict()
    assert json.loads(json.dumps(record)) == record
    assert [a["open"] for a in record["alarms"] if a["kind"] == "skipped_in_a_row"] == [False, True]
    home = monitor.save(tmp_path / "out")
    saved = json.loads((home / "monitor.json").read_text())
    assert saved["samples"] == record["samples"]
    page = (home / "monitor.html").read_text()
    for part in (
        "skipped_in_a_row",
        "Gradient norm",
        "Loss scale",
        'class="sortable"',
        "not distinguishable from",
        "was cleared",
    ):
        assert part in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_an_empty_report_says_so(tmp_path: Path) -> None:
    monitor = Monitor(castwise.Amp("fp32"))
    assert monitor.to_dict()["steps"] == 0
    assert (monitor.save(tmp_path) / "monitor.html").exists()


def test_it_goes_on_after_a_change_of_the_plan() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = castwise.Amp("fp32", device=DEVICE)
    amp.prepare(model, optimizer)
    with castwise.Monitor(amp, every=1) as monitor:
        for plan in ("fp32", "fp16-mixed"):
            if plan != str(amp.plan):
                amp.change(plan)
            for _ in range(3):
                amp.backward(model(torch.randn(4, 8)).square().mean())
                amp.step(optimizer)
                optimizer.zero_grad()
        assert monitor.step == 6
        assert [sample.loss_scale for sample in monitor.samples] == [
            None,
            None,
            None,
            65536.0,
            65536.0,
            65536.0,
        ]


def test_a_resumed_run_counts_its_skipped_steps_on() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    with castwise.Amp("bf16-mixed", patience=50) as amp:
        amp.prepare(net, made)
        first = Monitor(amp, every=1)
        train(amp, net, made, 6, poison=[2, 3, 5])
        state = json.loads(json.dumps(first.state_dict()))
        first.close()
    amp = castwise.Amp("bf16-mixed", patience=50)
    amp.prepare(net, made)
    second = Monitor(amp, every=1)
    second.load_state_dict(state)
    assert second.skipped_steps == 3
    train(amp, net, made, 4, poison=[4])
    assert second.report().skipped_steps == second.skipped_steps == 4
    assert [s.skipped_steps for s in second.samples] == [3, 3, 3, 4]
    assert second.state_dict()["skipped_steps"] == 4


def test_what_is_wrong_with_a_loss_is_an_error_at_the_first_step_of_a_resumed_run_too() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    turns = [{"number": 0, "steps": 4990, "streak": 0, "made": True}]
    monitor = Monitor(amp, loss=lambda net, batch: net(batch[0]), batches=batches())
    monitor.load_state_dict({"version": 1, "turns": turns, "open_alarms": []})
    with pytest.raises(WorkloadError, match=r"Monitor.audit"):
        train(amp, net, made, 1)


@pytest.mark.parametrize(("key", "value"), [("steps", -1), ("steps", 2.5), ("streak", True), ("number", "0")])
def test_a_state_whose_counts_are_none_is_refused(key: str, value: Any) -> None:
    turn = {"number": 0, "steps": 3, "streak": 0, "made": True, key: value}
    monitor = Monitor(castwise.Amp("bf16-mixed"))
    with pytest.raises(CheckpointError, match=r"not the state_dict\(\) of a Monitor"):
        monitor.load_state_dict({"version": 1, "turns": [turn], "open_alarms": []})


def test_what_is_drawn_at_each_sample_is_the_last_and_says_the_same() -> None:
    net = model()
    made = torch.optim.SGD(net.parameters(), 1e-2)
    amp = castwise.Amp("bf16-mixed")
    amp.prepare(net, made)
    monitor = Monitor(amp, every=1, loss=loss, batches=batches(), audit_every=2)
    train(amp, net, made, 5)
    now, whole = monitor._now(), monitor.report()
    assert (len(now.samples), len(now.audits), len(whole.samples)) == (1, 1, 5)
    consoles = [Console(file=io.StringIO(), width=100) for _ in range(2)]
    for console, report in zip(consoles, (now, whole), strict=True):
        console.print(report.table())
    one, other = (console.file.getvalue() for console in consoles)  # type: ignore[attr-defined]
    assert one == other
