"""Audits report a plan that becomes unsound late in training, and raise no alarm about a sound one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise.errors import PlanError, WorkloadError
from castwise.lab.watch import Alarm, Audit, Monitor
from castwise.lab.watch.audit import badness
from tests.lab.watch.jobs import batches, loss, model, train
from tests.soak import every


class Drifting(nn.Module):
    """A model whose plan is sound until ``shift`` grows and bf16 rounds away the difference of two large numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)
        self.register_buffer("shift", torch.zeros(()))
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = hidden + self.shift.to(hidden.dtype)
        return self.second(torch.tanh(hidden - self.shift.to(hidden.dtype)))  # type: ignore[no-any-return]


class Sometimes(Drifting):
    """Adds and subtracts a large number for batches with large inputs."""

    def forward(self, x: Tensor) -> Tensor:
        self.shift = torch.tensor(300.0 if x.abs().max() > 50.0 else 0.0)
        return super().forward(x.clamp(-3.0, 3.0))


def watched(plan: str, net: nn.Module | None = None, **how: Any) -> tuple[Any, Any, Any, Monitor]:
    net = Drifting() if net is None else net
    made = torch.optim.AdamW(net.parameters(), 1e-3)
    amp = castwise.Amp(plan)
    amp.prepare(net, made)
    how = {"loss": loss, "batches": batches(12, seed=3), **how}
    return amp, net, made, Monitor(amp, **how)


@every(2)
@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master", "bf16-true", "O2"])
def test_a_sound_plan_is_sound_and_one_that_breaks_later_is_caught_then(plan: str) -> None:
    seen: list[Alarm] = []
    amp, net, made, monitor = watched(plan, audit_every=5, on_alarm=seen.append, lines={"lost_updates": None})

    def drift(step: int) -> None:
        if step == 12:
            with torch.no_grad():
                net.shift.fill_(20000.0 if "O2" in plan else 300.0)

    train(amp, net, made, 15, after=drift)
    verdicts = [(audit.step, audit.verdict) for audit in monitor.audits]
    assert verdicts == [(1, "pass"), (5, "sound"), (10, "sound"), (15, "fail")]
    assert [(a.kind, a.step) for a in seen if a.kind == "audit"] == [("audit", 15)]
    last = monitor.audits[-1]
    assert last.damage is not None
    assert last.damage > 0.1
    assert last.microbatches >= 16  # a failure is confirmed on fresh microbatches
    assert last.regions[0][0] in ("first", "second")
    with torch.no_grad():
        net.shift.zero_()
    assert monitor.audit().verdict in ("sound", "pass")
    assert not [a for a in monitor.open_alarms if a.kind == "audit"]


def test_an_audit_after_one_that_did_not_pass_is_no_small_one() -> None:
    """A plan that damages one batch in eight would be sound on most pairs of batches."""

    def mixed(seed: int) -> Any:
        for number, (inputs, targets) in enumerate(batches(400, seed=seed)):
            yield (inputs * 100.0 if number % 8 == 7 else inputs), targets

    amp, net, made, monitor = watched("bf16-mixed", Sometimes(), batches=mixed)
    train(amp, net, made, 3)
    verdicts = [monitor.audit() for _ in range(4)]
    assert verdicts[0].verdict != "pass"
    assert all(one.microbatches > 8 for one in verdicts)
    assert "sound" not in {one.verdict for one in verdicts}


def test_a_fault_of_a_tenth_of_the_update_is_no_sound_plan() -> None:
    """The damage of the low format is raised in steps; the audit must agree with parity() at each."""
    amp, net, made, monitor = watched("bf16-mixed", audit_every=2)
    train(amp, net, made, 4)
    for shift, sound in ((0.0, True), (1.0, True), (1000.0, False)):
        net.shift.fill_(shift)
        audit = monitor.audit()
        truth = castwise.parity(
            net, loss, batches(12, seed=3), "bf16-mixed", optimizer=lambda p: torch.optim.AdamW(p, 1e-3)
        )
        assert (audit.verdict in ("sound", "pass")) is sound
        assert (truth.verdict != "fail") is sound


def test_conv_before_batch_norm_has_no_gradient_and_raises_no_doubt() -> None:
    """The gradient of a bias before BatchNorm is only rounding error, which is large in units of Adam's steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    amp, net, made, monitor = watched("bf16-mixed", net, audit_every=3)
    train(amp, net, made, 9)
    assert [audit.verdict for audit in monitor.audits][1:] == ["sound"] * 3
    assert [audit.microbatches for audit in monitor.audits][1:] == [2] * 3


def test_plans_that_claim_settings_of_the_process_are_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    amp, net, made, monitor = watched("bf16-mixed+fp32_matmul=ieee", audit_every=2)
    with castwise.Amp("fp32+fp32_conv=ieee") as other:
        other.prepare(nn.Linear(1, 1))
        train(amp, net, made, 4)
    held = torch.backends.mkldnn.matmul.fp32_precision
    assert held == "ieee"
    assert {audit.verdict for audit in monitor.audits} <= {"pass", "sound"}
    amp.close()
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_what_is_wrong_with_loss_or_batches_is_an_error_at_the_first_step() -> None:
    def wrong(net: nn.Module, batch: Any) -> Tensor:
        return net(batch[0])  # type: ignore[no-any-return]

    amp, net, made, _ = watched("bf16-mixed", loss=wrong)
    with pytest.raises(WorkloadError, match=r"Monitor.audit.*"):
        train(amp, net, made, 1)
    amp.close()


def test_a_loss_that_calls_the_model_itself_is_refused_and_its_gradients_stay() -> None:
    net = Drifting()

    def own(_: nn.Module, batch: Any) -> Tensor:
        return loss(net, batch)

    amp, net, _, monitor = watched("bf16-mixed", net, loss=own, audit_every=1000)
    amp.backward(loss(net, batches()[0]))
    before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    with pytest.raises(WorkloadError, match="call the model that it is given"):
        monitor.audit()
    assert all(
        torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True) if p.grad is not None
    )


def test_a_later_audit_that_cannot_be_made_is_said_and_training_goes_on() -> None:
    amp, net, made, monitor = watched("bf16-mixed", audit_every=2)
    train(amp, net, made, 2)
    with torch.no_grad():
        net.second.bias[0] = math.nan
    amp.patience = 100
    train(amp, net, made, 2)
    last = monitor.audits[-1]
    assert last.verdict == "undecided"
    assert "not finite in fp32 already" in last.reason
    assert monitor.report().unseen
    assert monitor.step == 4


def test_an_interrupt_in_an_audit_leaves_everything_as_it_was() -> None:
    calls = [0]

    def interrupted(net: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return loss(net, batch)

    net = model()
    amp, net, made, monitor = watched("fp16-mixed", net, loss=interrupted, audit_every=1000)
    amp.backward(loss(net, batches()[0]))
    state = {name: value.clone() for name, value in net.state_dict().items()}
    rng, hooks = torch.get_rng_state(), [len(vars(m)["_forward_hooks"]) for m in net.modules()]
    with pytest.raises(KeyboardInterrupt):
        monitor.audit()
    assert torch.equal(rng, torch.get_rng_state())
    assert hooks == [len(vars(m)["_forward_hooks"]) for m in net.modules()]
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    amp.step(made)


def test_an_audit_needs_one_model_and_a_loss() -> None:
    amp = castwise.Amp("bf16-mixed")
    with pytest.raises(PlanError, match=r"Monitor.audit\(\): needs Monitor\(amp, loss=..., batches=...\)"):
        Monitor(amp).audit()
    with pytest.raises(PlanError, match="needs a session with one model, and this one has 0"):
        Monitor(amp, loss=loss, batches=batches()).audit()


def test_findings_are_ordered() -> None:
    order = [Audit(1, "sound", "", 0.01), Audit(1, "pass", "", 0.001), Audit(1, "undecided", ""),
             Audit(1, "fail", "", 0.2), Audit(1, "fail", "", 0.3)]  # fmt: skip
    assert sorted([order[i] for i in (3, 0, 4, 2, 1)], key=badness) == order
