"""A write to a master outside of ``step`` reaches the model, and a write to the model reaches the master."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import castwise
from castwise.core.masters import Master, attach, attachment_of, fp32_state_dict, master_of
from castwise.errors import StateError
from tests.core.masters.outside import SAM, Lookahead, ScheduleFree
from tests.core.masters.presets import MASTERS
from tests.core.masters.test_masters_gradients import held, prepared
from tests.core.masters.test_masters_optimizers import Weights, batches, lower
from tests.here import DEVICE
from tests.soak import every, pairs


def agrees(model: nn.Module) -> bool:
    """Return whether every low-precision parameter equals its rounded master."""
    pairs = [(p, master_of(p)) for p in model.parameters() if p.dtype is not torch.float32]
    assert pairs
    return all(m is not None and torch.equal(p.detach(), m.detach().to(p.dtype)) for p, m in pairs)


class Seen(Weights):
    """Records the weights that each forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.a.weight.detach().float().clone())
        return super().forward(x)


def session(
    plan: str | castwise.Plan, make: Any, kind: type[nn.Module] = Seen
) -> tuple[castwise.Amp, Any, Any]:
    torch.manual_seed(0)
    model = kind()
    optimizer = make(model.parameters())
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    return amp, model, optimizer


@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize("base", ["sgd", "adamw-fused"])
@pytest.mark.parametrize("prepared", ["outer", "base"])
def test_sam_evaluates_where_it_climbed_to(prepared: str, base: str, data: bool) -> None:
    """SAM then returns to the start. The reference is SAM by hand on fp32 weights with a rounded forward."""
    kind: Any = torch.optim.SGD if base == "sgd" else torch.optim.AdamW
    options = {"lr": 0.1} if base == "sgd" else {"lr": 0.01, "fused": True}
    torch.manual_seed(0)
    model, oracle = Seen(), Weights()
    oracle.load_state_dict(model.state_dict())
    optimizer = SAM(model.parameters(), kind, rho=0.5, data=data, **options)
    plain = SAM(oracle.parameters(), kind, rho=0.5, data=data, **options)
    amp = castwise.Amp("bf16-master", device=DEVICE)
    amp.prepare(model, optimizer if prepared == "outer" else optimizer.base_optimizer)
    for x in batches(4):
        for who, move in ((optimizer, plain), (optimizer, plain)):
            rounded = [p.detach().bfloat16() for p in oracle.parameters()]
            model(x).square().mean().backward()
            assert torch.equal(model.seen[-1], rounded[0].float())
            for p, q in zip(oracle.parameters(), model.parameters(), strict=True):
                assert q.grad is not None
                p.grad = q.grad.clone()
            if len(model.seen) % 2:
                who.first_step(zero_grad=True)
                move.first_step(zero_grad=True)
            else:
                who.second_step(zero_grad=True)
                move.second_step(zero_grad=True)
        assert not torch.equal(model.seen[-1], model.seen[-2])
    for parameter, want in zip(model.parameters(), oracle.parameters(), strict=True):
        master = master_of(parameter)
        assert master is not None
        assert torch.equal(master.detach(), want.detach())
    for key, value in amp.model_state_dict(model).items():
        assert torch.equal(value, oracle.state_dict()[key])
    assert agrees(model)


@pytest.mark.parametrize("plan", MASTERS)
def test_schedule_free_switches_the_model(plan: str) -> None:
    """``eval()`` before a checkpoint and ``train()`` before the next epoch change weights without a step."""
    amp, model, optimizer = session(plan, ScheduleFree)
    for x in batches(3):
        amp.backward(model(x).square().mean())
        amp.step(optimizer)
        optimizer.zero_grad()
    training = [p.detach().clone() for p in held(optimizer)]
    optimizer.eval()
    evaluated = [p.detach().clone() for p in held(optimizer)]
    assert not torch.equal(training[0], evaluated[0])
    with torch.inference_mode():
        model(batches(1)[0])
    assert torch.equal(model.seen[-1], evaluated[0].to(model.a.weight.dtype).float())
    assert torch.equal(amp.model_state_dict(model)["a.weight"], evaluated[0])
    optimizer.train()
    state = model.state_dict()
    assert torch.equal(state["a.weight"], held(optimizer)[0].detach().to(model.a.weight.dtype))
    torch.testing.assert_close(held(optimizer)[0].detach(), training[0])
    amp.close()


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_lookahead_replaces_the_weights_after_the_step(fused: bool, replace: bool) -> None:
    """It writes through ``p.data.copy_`` and ``p.data = ...``, which torch does not count as writes."""
    amp, model, base = session("bf16-master", lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused))
    optimizer = Lookahead(base, replace=replace)
    for x in batches(5):
        amp.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.count == 5
    model(batches(1)[0])
    assert agrees(model)
    master = held(base)[0].detach().clone()
    assert torch.equal(model.seen[-1], master.bfloat16().float())
    amp.close()
    assert torch.equal(model.a.weight.detach(), master)


def test_masters_by_hand_at_every_look() -> None:
    """A master written by hand reaches the model before it is read: forward, state dicts, the session's state, the next
    step.
    """
    for look in (
        lambda model, optimizer: model(batches(1)[0]),
        lambda model, optimizer: model.state_dict(),
        lambda model, optimizer: nn.Sequential(model).state_dict(),
        lambda model, optimizer: fp32_state_dict(model),
        lambda model, optimizer: attachment_of(optimizer).state_dict(),
        lambda model, optimizer: optimizer.step(),
    ):
        model, optimizer = prepared()
        with torch.no_grad():
            held(optimizer)[0][0] = 3.0078125 / 3
        held(optimizer)[1].data.mul_(2)
        look(model, optimizer)
        assert agrees(model)
        assert (held(optimizer)[0][0] == 3.0078125 / 3).all()


def test_both_written_alike_is_no_conflict() -> None:
    """``load_state_dict`` writes both."""
    model, optimizer = prepared()
    with torch.no_grad():
        for master, parameter in zip(held(optimizer), model.parameters(), strict=True):
            master.fill_(1 / 3)
            parameter.fill_(1 / 3)
    model(batches(1)[0])
    assert (held(optimizer)[0] == torch.tensor(1 / 3)).all()


def test_both_written_differently_is_said_and_the_master_holds() -> None:
    """A conflict causes a warning, and the master's values are used."""
    model, optimizer = prepared()
    with torch.no_grad():
        held(optimizer)[0].fill_(2.0)
        model.a.weight.fill_(5.0)
    with pytest.warns(UserWarning, match=r"both written, to different values.*master's values are used"):
        model(batches(1)[0])
    assert (held(optimizer)[0] == 2).all()
    assert agrees(model)
    with torch.no_grad():
        model.a.weight.fill_(5.0)
    optimizer.step()
    assert (held(optimizer)[0] == 5).all()


def test_an_optimizer_inside_a_prepared_one_steps_masters_by_itself() -> None:
    """A fused kernel does not count its writes, and this optimizer has none of castwise's hooks."""
    torch.manual_seed(0)
    model = Weights()
    former = lower(model, torch.bfloat16)
    outer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(outer, model, originals=former)
    inner = torch.optim.AdamW(held(outer), lr=0.1, fused=True)
    model(batches(1)[0]).square().mean().backward()
    before = model.a.weight.detach().clone()
    inner.step()
    assert agrees(model)
    assert not torch.equal(before, model.a.weight.detach())


@pytest.mark.parametrize("plan", MASTERS)
@pytest.mark.parametrize("fused", [False, True])
def test_the_model_is_up_to_date_after_a_step_by_a_framework(plan: str, fused: bool) -> None:
    """The framework calls ``optimizer.step()`` itself, also through the class or with a closure, without loss scaling."""
    unscaled = dataclasses.replace(castwise.Plan.preset(plan), loss_scale=None)
    amp, model, optimizer = session(unscaled, lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused))
    for number, x in enumerate(batches(3)):
        before = held(optimizer)[0].detach().clone()

        def closure(x: Tensor = x) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()  # type: ignore[no-any-return]

        if number == 2:
            optimizer.step(closure)
        else:
            closure()
            (optimizer.step if number else type(optimizer).step)(*([] if number else [optimizer]))
        assert agrees(model)
        assert not torch.equal(before, held(optimizer)[0].detach())
        optimizer.zero_grad()
    amp.close()


def test_a_compiled_model_trains_without_the_look() -> None:
    """The hook causes no graph break, and steps update the model as usual."""
    torch._dynamo.reset()
    model, optimizer = prepared()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    for x in batches(2):
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert agrees(model)


def test_copies_and_pickles_of_a_model_carry_no_masters() -> None:
    """The hooks hold no references."""
    model, optimizer = prepared()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            held(optimizer)[0].add_(1.0)
        kept = other.a.weight.detach().clone()
        other(batches(1)[0])
        assert torch.equal(other.a.weight.detach(), kept)
        assert not any(isinstance(p, Master) for p in other.parameters())


def test_a_model_made_fp32_is_noticed_when_its_masters_are_written() -> None:
    """The error is the same as at a step."""
    model, optimizer = prepared()
    model.float()
    with torch.no_grad():
        held(optimizer)[0].add_(1.0)
    with pytest.raises(StateError, match="prepare the model again"):
        model(batches(1)[0])


class Around(nn.Module):
    """A model that contains a prepared model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def compiled_function(model: nn.Module, broken: bool, **options: Any) -> Any:
    def run(x: Tensor) -> Tensor:
        if broken:
            torch._dynamo.graph_break()
        return model(x)  # type: ignore[no-any-return]

    return torch.compile(run, fullgraph=not broken, **options)


def compiled_in_place(model: nn.Module, **options: Any) -> Any:
    model.compile(fullgraph=True, **options)
    return model


COMPILED: dict[str, Any] = {
    "model": lambda model, **options: torch.compile(model, fullgraph=True, **options),
    "in place": compiled_in_place,
    "function": lambda model, **options: compiled_function(model, False, **options),
    "broken function": lambda model, **options: compiled_function(model, True, **options),
    "around": lambda model, **options: torch.compile(Around(model), fullgraph=True, **options),
}


@every(2, 1)
@pytest.mark.parametrize(("way", "backend"), pairs(COMPILED, ["aot_eager", "eager"]))
def test_a_compiled_model_gets_what_was_written_to_masters(way: str, backend: str) -> None:
    """As in eager mode, the model is updated before its forward, from the first compiled call on and without
    recompiling.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = ScheduleFree(model.parameters())
    with castwise.Amp("bf16-master", device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        run, x = COMPILED[way](model, backend=backend), batches(1)[0]
        graphs: list[int] = []
        for _ in range(3):
            with torch.no_grad():
                for master in held(optimizer):
                    master.mul_(1.25)
            out = run(x)
            assert agrees(model)
            torch.testing.assert_close(out, model(x), rtol=0.02, atol=0.02)
            amp.backward(out.square().mean())
            amp.step(optimizer)
            optimizer.zero_grad()
            optimizer.eval()
            evaluated = run(x)
            assert agrees(model)
            assert not torch.equal(evaluated, out)
            optimizer.train()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert graphs[0] == graphs[2]


def test_a_compiled_model_outlives_its_session() -> None:
    """The hook before the forward keeps nothing alive and has no effect after close."""
    torch._dynamo.reset()
    amp, model, _ = session("bf16-master", lambda p: torch.optim.SGD(p, 0.1), Weights)
    run = COMPILED["function"](model, backend="eager")
    run(batches(1)[0])
    amp.close()
    with torch.no_grad():
        model.a.weight.add_(1.0)
    assert torch.equal(run(batches(1)[0]), model(batches(1)[0]))


@pytest.mark.parametrize("plan", MASTERS)
def test_a_getter_after_data_was_replaced_writes_nothing_back(plan: str) -> None:
    """After ``parameter.data = average``, as in torch's model averaging, some elements can equal old ones rounded to
    another format.
    """
    amp, model, _ = session(plan, torch.optim.AdamW)
    with amp:
        shift = torch.Generator(DEVICE).manual_seed(3)
        for parameter in model.parameters():
            moved = parameter.data.float() * (1 + 0.002 * torch.randn(parameter.shape, generator=shift))
            parameter.data = moved.to(parameter.dtype)
        want = [parameter.detach().clone() for parameter in model.parameters()]
        weights = amp.model_state_dict(model)
        assert all(map(torch.equal, model.parameters(), want))
        assert all(torch.equal(weights[key].to(p.dtype), p) for key, p in model.named_parameters())
        assert agrees(model)
