"""Windows of gradients: which gradients belong to one, at which scale, and when it ends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import castwise
from castwise import LossScale, Plan
from castwise.errors import StateError
from tests.here import DEVICE
from tests.soak import each_value

INF = float("inf")
MOVING = Plan(compute="fp32", loss_scale=LossScale(init=64.0, interval=1))
"""fp32 arithmetic with a scale that doubles at every window, so gradients at a wrong scale always show."""


class Pair(nn.Module):
    """Two parts in one loss, with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def pair(plan: Any = MOVING) -> tuple[castwise.Amp, Pair, torch.optim.Optimizer, torch.optim.Optimizer]:
    model = Pair()
    a = torch.optim.SGD(model.a.parameters(), 0.125, momentum=0.5)
    b = torch.optim.SGD(model.b.parameters(), 0.25)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, a, b)
    return amp, model, a, b


def batch(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator(DEVICE).manual_seed(seed))


# --- getters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("getter", ["get_scale", "state_dict", "repr", "scaler"])
def test_asking_between_two_steps_changes_nothing(getter: str) -> None:
    def run(ask: bool) -> list[torch.Tensor]:
        amp, model, a, b = pair()
        for seed in range(3):
            amp.backward(model(batch(seed)).pow(2).mean())
            amp.step(a)
            if ask:
                {
                    "get_scale": amp.get_scale,
                    "state_dict": amp.state_dict,
                    "repr": lambda: repr(amp),
                    "scaler": lambda: (amp.scaler.get_scale(), amp.scaler.state_dict(), amp.skipped_steps),
                }[getter]()
            amp.step(b)
            a.zero_grad()
            b.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


@pytest.mark.parametrize(
    "plan", [MOVING, "fp16-mixed+loss_scale.init=64+loss_scale.interval=2", "fp16-master"]
)
@pytest.mark.parametrize("factor", [1.0, INF])
def test_a_state_taken_after_a_step_resumes_bit_for_bit(plan: Any, factor: float) -> None:
    def go_on(amp: castwise.Amp, model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[Any]:
        for seed in range(2, 5):
            amp.backward(model(batch(seed)).pow(2).mean())
            for optimizer in optimizers:
                amp.step(optimizer)
                optimizer.zero_grad()
        return [amp.state_dict(), *(p.detach().clone() for p in model.parameters())]

    amp, model, a, b = pair(plan)
    amp.backward(model(batch(1)).pow(2).mean() * factor)
    for optimizer in (a, b):
        amp.step(optimizer)
        optimizer.zero_grad()
    state = copy.deepcopy((amp.state_dict(), amp.model_state_dict(model), a.state_dict(), b.state_dict()))
    assert state[0] == amp.state_dict()
    assert state[0]["scaler"]["scale"] == amp.get_scale()
    want = go_on(amp, model, a, b)
    amp.close()

    twin = Pair()
    twin.load_state_dict(state[1])
    optimizers = (
        torch.optim.SGD(twin.a.parameters(), 0.125, momentum=0.5),
        torch.optim.SGD(twin.b.parameters(), 0.25),
    )
    for optimizer, saved in zip(optimizers, state[2:], strict=True):
        optimizer.load_state_dict(saved)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(twin, *optimizers)
    amp.load_state_dict(state[0])
    got = go_on(amp, twin, *optimizers)
    assert got[0] == want[0]
    assert all(map(torch.equal, got[1:], want[1:]))


# --- gradients that outlive a window ------------------------------------------------------------------------


def test_one_accumulates_while_another_steps() -> None:
    """The networks of a GAN do this, and any part updated every second batch."""
    amp, model, a, b = pair()
    plain = Pair()
    for seed in range(2):
        amp.backward(model(batch(seed)).pow(2).mean())
        plain(batch(seed)).pow(2).mean().backward()
        amp.step(a)
        a.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(model.a.parameters(), plain.a.parameters(), strict=True):
                theirs.copy_(mine)
                theirs.grad = None
    amp.unscale_(b)
    for mine, theirs in zip(model.b.parameters(), plain.b.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=0)


WHO = st.sampled_from(["a", "b"])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("backward"), st.sampled_from(["a", "b", "ab"])),
        st.tuples(st.just("backward"), st.sampled_from(["a", "b", "ab"])),
        st.tuples(st.just("scale"), st.sampled_from(["a", "ab"])),
        st.tuples(st.just("step"), WHO),
        st.tuples(st.just("step"), WHO),
        st.tuples(st.just("step"), st.just("ab")),
        st.tuples(st.just("clip"), WHO),
        st.tuples(st.just("unscale"), WHO),
        st.tuples(st.just("zero"), WHO),
        st.tuples(st.just("fill"), WHO),
        st.tuples(st.just("save"), WHO),
        st.tuples(st.just("load"), WHO),
        st.tuples(st.just("ask"), WHO),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, fused=st.booleans())
def test_any_order_of_calls_gives_the_gradients_of_a_loop_without_a_scale(
    actions: list[tuple[str, str]], fused: bool
) -> None:
    """With integers, and powers of two as scales, weights and gradients are exactly equal."""

    class Loop:
        def __init__(self, plan: Any) -> None:
            self.model = nn.ParameterDict({name: torch.ones(3) for name in "ab"})
            self.optimizers = {name: torch.optim.SGD([self.model[name]], 0.25, fused=fused) for name in "ab"}
            self.amp = castwise.Amp(plan, device=DEVICE)
            self.amp.prepare(self.model, *self.optimizers.values())
            self.state = self.amp.state_dict()
            self.fed: set[str] = set()

        def run(self, action: str, who: str, number: int) -> None:
            amp, optimizers = self.amp, self.optimizers
            if action in ("backward", "scale"):
                loss = sum((self.model[name].sum() * (number + 1) for name in who), torch.zeros(()))
                if action == "backward":
                    amp.backward(loss)
                else:
                    amp.scale(loss).backward()
                self.fed.update(who)
            elif action == "step" and self.fed >= set(who):
                amp.step(*(optimizers[name] for name in who))
                self.fed -= set(who)
            elif action == "clip" and self.fed >= set(who):
                amp.step(optimizers[who], max_norm=1024.0)
                self.fed.discard(who)
            elif action == "unscale":
                if self.model[who].grad is not None:
                    amp.unscale_(optimizers[who])
            elif action in ("zero", "fill"):
                optimizers[who].zero_grad(set_to_none=action == "zero")
                self.fed.discard(who)
            elif action == "save":
                self.state = amp.state_dict()
            elif action == "load":
                amp.load_state_dict(self.state)
            elif action == "ask":
                amp.get_scale()
                amp.state_dict()

        def seen(self) -> list[Any]:
            for name in "ab":
                if self.model[name].grad is not None:
                    self.amp.unscale_(self.optimizers[name])
            return [(p.tolist(), None if p.grad is None else p.grad.tolist()) for p in self.model.values()]

    loops = Loop(MOVING), Loop("fp32")
    for number, (action, who) in enumerate(actions):
        for loop in loops:
            loop.run(action, who, number)
    assert loops[0].seen() == loops[1].seen()


# --- other ends of a window ----------------------------------------------------------------------------------


@each_value(2)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["plain", "unscaled", "max_norm", "joint", "scale"])
@pytest.mark.parametrize("then", ["clear", "again", "keep"])
def test_a_step_that_fails_leaves_gradients_that_are_known(
    error: type[BaseException], fused: bool, way: str, then: str
) -> None:
    """Whatever optimizer.step() raises, the next step equals that of a loop without a scale."""

    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                self.fails = False
                raise error("out of memory")
            return super().step(closure)

    def run(amp: castwise.Amp | None) -> list[torch.Tensor]:
        model = Pair()
        a = Failing(model.a.parameters(), 0.125, fused=fused)
        b = torch.optim.SGD(model.b.parameters(), 0.25)
        if amp is not None:
            amp.prepare(model, a, b)

        def backward(seed: int) -> None:
            loss = model(batch(seed)).pow(2).mean()
            if amp is None:
                loss.backward()
            elif way == "scale":
                amp.scale(loss).backward()
            else:
                amp.backward(loss)

        def step() -> None:
            if amp is None:
                a.step()
                b.step()
            elif way == "joint":
                amp.step(a, b)
            else:
                if way == "unscaled":
                    amp.unscale_(a)
                amp.step(a, max_norm=1e9 if way == "max_norm" else None)
                amp.step(b)

        for seed in range(3):
            backward(seed)
            a.fails = seed == 1
            try:
                step()
            except error:
                if then == "keep":
                    continue
                if then == "again":
                    step()
            a.zero_grad()
            b.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    with castwise.Amp(MOVING, device=DEVICE) as amp:
        torch.testing.assert_close(run(amp), run(None), rtol=1e-5, atol=1e-7)


@each_value()
@pytest.mark.parametrize("between", ["load", "load another", "grad", "nothing"])
@pytest.mark.parametrize("held", ["scaled", "stepped"])
@pytest.mark.parametrize("then", ["loss", "other"])
def test_a_named_loss_gives_held_gradients_their_size(between: str, held: str, then: str) -> None:
    amp, model, a, b = pair()
    plain = Pair()
    amp.backward(model(batch(0)).pow(2).mean(), "other")  # makes its scale differ from the other's
    for optimizer in (a, b):
        amp.step(optimizer)
    plain.load_state_dict(model.state_dict())
    for optimizer in (a, b):
        optimizer.zero_grad()
    amp.backward(model(batch(1)).pow(2).mean(), "other")
    plain(batch(1)).pow(2).mean().backward()
    if held == "stepped":
        before = [p.detach().clone() for p in model.parameters()]
        amp.step(a, b)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
    if "load" in between:
        state = amp.state_dict()
        if between == "load another":
            state["scaler"] = {key: value for key, value in state["scaler"].items() if key != "losses"}
            state["scaler"]["scale"] = 4096.0
        amp.load_state_dict(state)
    elif between == "grad":
        x = batch(2).requires_grad_()
        amp.grad(model(x).sum(), x)
    amp.backward(model(batch(3)).pow(2).mean(), then)
    plain(batch(3)).pow(2).mean().backward()
    for optimizer in (a, b):
        amp.unscale_(optimizer)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("way", ["step", "max_norm", "direct", "unscale"])
@pytest.mark.parametrize("by", ["backward", "scale"])
def test_steps_while_a_backward_runs(way: str, by: str) -> None:
    """Each parameter has an optimizer, which steps when its gradient arrives."""
    ends = []
    for amp in (castwise.Amp(MOVING, device=DEVICE), None):
        model = Pair()
        optimizers = {p: torch.optim.SGD([p], 0.125) for p in model.parameters()}

        def hook(p: torch.Tensor, amp: Any = amp, optimizers: Any = optimizers) -> None:
            if amp is None or way == "direct":
                optimizers[p].step()
            elif way == "unscale":
                amp.unscale_(optimizers[p])
            else:
                amp.step(optimizers[p], max_norm=1e9 if way == "max_norm" else None)
            optimizers[p].zero_grad()

        if amp is not None:
            amp.prepare(model, *optimizers.values())
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        for seed in range(3):
            loss = model(batch(seed)).pow(2).mean()
            if amp is None:
                loss.backward()
            elif way in ("direct", "unscale"):
                with pytest.raises(
                    StateError,
                    match="scale is still in its" if way == "direct" else "called inside a backward",
                ):
                    amp.backward(loss) if by == "backward" else amp.scale(loss).backward()
                amp.close()
                return
            else:
                amp.backward(loss) if by == "backward" else amp.scale(loss).backward()
        ends.append([p.detach().clone() for p in model.parameters()])
        if amp is not None:
            amp.close()
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-7)


# --- what causes an error -------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-master", "fp16-true+loss_scale.init=8", "O1"])
@pytest.mark.parametrize("by", ["backward", "scale"])
def test_a_step_with_the_scale_still_in_the_gradients_is_refused(plan: str, by: str) -> None:
    amp, model, a, b = pair(plan)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(batch(0)).pow(2).mean()
    amp.backward(loss) if by == "backward" else amp.scale(loss).backward()
    with pytest.raises(
        StateError, match=r"SGD\.step\(\): the loss scale is still in its gradients.*amp\.step\(optimizer\)"
    ):
        a.step()
    assert all(map(torch.equal, before, model.parameters()))
    amp.unscale_(a)
    a.step()
    amp.step(b)
    assert not any(map(torch.equal, before, model.parameters()))
    amp.backward(model(batch(0)).pow(2).mean())
    amp.close()
    a.step()  # no longer guarded


@each_value()
@pytest.mark.parametrize("plan", ["fp16-mixed+loss_scale.init=64", "fp16-master+loss_scale.init=64"])
@pytest.mark.parametrize("by", ["backward", "scale"])
@pytest.mark.parametrize("how", ["norm", "value", "hand", "others", "some"])
def test_clipping_scaled_gradients_is_noticed_at_the_step(plan: str, by: str, how: str) -> None:
    amp, model, a, b = pair(plan)

    def compute() -> None:
        loss = model(batch(0)).pow(2).mean()
        amp.backward(loss) if by == "backward" else amp.scale(loss).backward()

    def clip() -> None:
        if how == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif how == "value":
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
        elif how == "others":
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clamp(-1, 1)
        else:
            with torch.no_grad():
                for parameter in model.parameters() if how == "hand" else [*model.a.parameters()]:
                    parameter.grad.clamp_(-1, 1)

    before = [p.detach().clone() for p in model.parameters()]
    compute()
    clip()
    for call in (
        lambda: amp.step(a),
        lambda: amp.step(a),
        lambda: amp.step(a, b),
        lambda: amp.step(a, max_norm=1.0),
    ):
        with pytest.raises(
            StateError, match=r"changed since the backward.*amp\.unscale_\(optimizer\) before"
        ):
            call()
    assert all(map(torch.equal, before, model.parameters()))
    for optimizer in (a, b):
        optimizer.zero_grad()
    compute()
    for optimizer in (a, b):
        amp.unscale_(optimizer)
    clip()
    assert not amp.step(a, b).skipped
    assert not any(map(torch.equal, before, model.parameters()))


def test_what_is_no_clipping_raises_no_alarm() -> None:
    amp, model, a, b = pair()
    for _ in range(3):
        amp.backward(model(batch(0)).pow(2).mean())
    model.a.weight.grad[0, 0] = INF  # one element of one gradient
    with torch.no_grad():
        model.b.bias.grad = model.b.bias.grad * 0.5  # replaced by another tensor
    assert amp.step(a).skipped
    assert not amp.step(b).skipped


def test_the_scale_itself_is_asked_for_and_brought_in_by_hand() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    amp = castwise.Amp("fp16-mixed", device=DEVICE)
    amp.prepare(model, optimizer)
    before = model.weight.detach().clone()
    scale = amp.scale(torch.ones(()))
    assert float(scale) == amp.get_scale() > 1.0
    model.weight.grad = scale * torch.ones(1, 2)
    assert not amp.step(optimizer).skipped
    assert torch.equal(model.weight.detach(), before - 0.5)


def test_a_plain_backward_after_a_scale_that_nobody_used_is_noticed() -> None:
    amp, model, a, b = pair("fp16-mixed")
    loss = model(batch(0)).pow(2).mean()
    amp.scale(loss)
    loss.backward()
    for step in (lambda: amp.step(a), lambda: amp.unscale_(b)):
        with pytest.raises(StateError, match=r"its gradients did not come from a scaled loss"):
            step()
    a.step()  # they contain no scale
    a.zero_grad()


@pytest.mark.parametrize("by", ["backward", "scale"])
def test_scaled_gradients_are_added_to_plain_ones(by: str) -> None:
    amp, model, a, b = pair("fp16-mixed+loss_scale.init=64")
    plain = copy.deepcopy(model)
    castwise.Amp("fp16-mixed", device=DEVICE).prepare(plain)
    for _ in range(2):
        amp.scale(model(batch(0)).pow(2).mean())
        for which in (model, plain):
            which(batch(0)).pow(2).mean().backward()
        loss = model(batch(1)).pow(2).mean()
        amp.backward(loss) if by == "backward" else amp.scale(loss).backward()
        plain(batch(1)).pow(2).mean().backward()
        amp.unscale_(a)
        amp.unscale_(b)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-4)
        for which in (model, plain):
            which.zero_grad()


def sgd(*params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for some in params for p in some], 0.1)


@each_value(2)
@pytest.mark.parametrize("plan", ["fp16-mixed", "O1", "fp16-true+loss_scale.init=8"])
@pytest.mark.parametrize("by", ["backward", "scale"])
@pytest.mark.parametrize("which", ["none", "same", "half", "hook", "clipped", "replaced"])
def test_an_optimizer_that_was_never_prepared_is_refused_scaled_gradients(
    plan: str, by: str, which: str
) -> None:
    model = Pair()
    amp = castwise.Amp(plan, device=DEVICE)
    whole = [sgd(model.parameters())] if which in ("same", "replaced") else []
    own = [sgd(model.a.parameters())] if which == "half" else whole
    amp.prepare(model, *own)
    if which == "replaced":
        amp.backward(model(batch(0)).pow(2).mean())
        amp.step(*own)
        model.zero_grad()
        own.clear()
        whole.clear()
    stranger = sgd(model.parameters() if which != "half" else model.b.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    if which == "hook":
        model.a.bias.register_post_accumulate_grad_hook(lambda _: stranger.step())

    def train() -> None:
        loss = model(batch(0)).pow(2).mean()
        amp.backward(loss) if by == "backward" else amp.scale(loss).backward()
        if which == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if which == "half":
            amp.step(*own)
        stranger.step()

    words = r"SGD\.step\(\): the loss scale is still.*amp\.prepare\(model, optimizer\)"
    with pytest.raises(StateError, match=words):
        train()
    if which != "half":
        assert all(map(torch.equal, before, model.parameters()))
    model.zero_grad()
    if which != "hook":
        model(batch(0)).pow(2).mean().backward()  # these contain no scale
        stranger.step()
        assert not any(map(torch.equal, before, model.parameters()))
    amp.close()


def test_plain_gradients_in_the_place_of_dropped_ones_are_not_taken_for_scaled() -> None:
    amp, model, a, b = pair("fp16-mixed")
    for _ in range(5):  # object ids are reused
        amp.backward(model(batch(0)).pow(2).mean())
        model.zero_grad()
        model(batch(0)).pow(2).mean().backward()
        with pytest.raises(StateError, match="did not come from a scaled loss"):
            amp.step(a)
        b.step()
        model.zero_grad()


def test_gradients_of_no_optimizer_come_to_a_scale_of_one_at_close() -> None:
    model, plain = Pair(), Pair()
    amp = castwise.Amp("fp16-mixed+loss_scale.init=64", device=DEVICE)
    amp.prepare(model)
    amp.backward(model(batch(0)).pow(2).mean())
    amp.close()
    plain(batch(0)).pow(2).mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-master"])
@pytest.mark.parametrize("later", [False, True])
def test_a_parameter_in_two_optimizers_is_refused_under_a_loss_scale(plan: str, later: bool) -> None:
    model = Pair()
    first, second = sgd(model.parameters()), sgd(model.a.parameters())
    amp = castwise.Amp(plan, device=DEVICE)
    whole = nn.Sequential(model)
    if later:
        amp.prepare(model, first)
    with pytest.raises(StateError, match=r"a\.weight of this \w+ is in two optimizers, SGD and SGD"):
        amp.prepare(whole, first, second)
    amp.close()
    with castwise.Amp("bf16-mixed", device=DEVICE) as amp:
        amp.prepare(model, first, second)


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "bf16-master"])
def test_nobody_looks_after_steps_once_the_session_is_closed(plan: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with castwise.Amp(plan, device=DEVICE) as amp:
        amp.prepare(model, optimizer)
        amp.backward(model(torch.ones(1, 2)).sum())
        amp.step(optimizer)
    model.weight.grad = torch.full_like(model.weight, float("nan"))
    optimizer.step()
    assert model.weight.isnan().all()


def test_one_optimizer_has_one_loss_scale() -> None:
    model, other = Pair(), Pair()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.125)
    first, second = castwise.Amp(MOVING, device=DEVICE), castwise.Amp(MOVING, device=DEVICE)
    first.prepare(model, optimizer)
    with pytest.raises(StateError, match=r"this SGD is already prepared by another Amp with a loss scale"):
        second.prepare(other, optimizer)
    first.close()
    second.prepare(other, optimizer)
    second.prepare(model, optimizer)
    second.close()


def test_errors_speak_of_what_there_is() -> None:
    amp, model, a, b = pair("fp16-mixed")
    model(batch(0)).sum().backward()
    with pytest.raises(
        StateError, match=r"step\(SGD\): its gradients did not come from a scaled loss.*amp\.backward\(loss\)"
    ):
        amp.step(a)
    with pytest.raises(
        StateError, match=r"SGD\.step\(\): the plan has a loss scale, but no loss was ever scaled"
    ):
        a.step()
    a.zero_grad()
    b.zero_grad()
    amp.unscale_(a)
    amp.unscale_(a)
    with pytest.raises(StateError, match=r"step\(SGD\): no parameter has a gradient.*amp\.backward\(loss\)"):
        amp.step(a)
    amp.backward(model(batch(0)).sum())
    amp.step(a)
    amp.unscale_(a)
    with pytest.raises(StateError, match=r"step\(SGD\): it has already stepped with these gradients"):
        amp.step(a)
    amp.step(b)
    optimizer = torch.optim.LBFGS(model.parameters())
    amp.close()
    amp = castwise.Amp("fp16-mixed", device=DEVICE)
    amp.prepare(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch(0)).pow(2).mean()
        loss.backward()
        return loss

    with pytest.raises(
        StateError, match=r"closure did not compute its gradients from a scaled loss.*amp\.backward"
    ):
        amp.step(optimizer, closure=closure)


@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-master"])
@pytest.mark.parametrize("by", ["step", "closure"])
def test_a_scale_that_nobody_ever_used_is_noticed_at_the_first_step(plan: str, by: str) -> None:
    """As in a trainer that does not know the session, also after loading a state. Once scaled, plain steps are fine."""
    amp, model, a, b = pair(plan)
    amp.load_state_dict(amp.state_dict())
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def compute() -> torch.Tensor:
        loss = model(batch(0)).sum()
        loss.backward()
        return loss.detach()

    def step() -> None:
        if by == "closure":
            a.step(compute)
        else:
            compute()
            a.step()

    for _ in range(2):
        with pytest.raises(StateError, match=r"SGD\.step\(\): .*no loss was ever scaled.*loss_scale=none"):
            step()
    assert all(torch.equal(was, now) for was, now in zip(before, model.parameters(), strict=True))
    for optimizer in (a, b):
        optimizer.zero_grad()
    amp.backward(model(batch(0)).sum())
    amp.step(a, b)
    for optimizer in (a, b):
        optimizer.zero_grad()
    step()
