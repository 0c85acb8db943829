"""Steps with non-finite gradients, under every plan."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import castwise
from castwise.core.plans.plan import PRESETS
from castwise.core.scaler import StepGuard
from castwise.errors import LossScaleError, NonFiniteError, PlanError, StateError
from tests.core.scaler.test_scaler_steps import another_ranks_flag
from tests.here import DEVICE, until_known
from tests.lifecycle.life import SkipsInit
from tests.soak import each_value, pairs

INF, NAN = float("inf"), float("nan")
UNSCALED = ["fp32", "bf16-mixed", "bf16-master", "bf16-true", "O0"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


X = torch.randn(12, 8, generator=torch.Generator(DEVICE).manual_seed(1))


class Run:
    """A model under a plan, with everything that a step could change."""

    def __init__(self, plan: Any, make: Callable[..., Any] | None = None, **options: Any) -> None:
        self.model = net()
        self.optimizer = (make or (lambda p: torch.optim.AdamW(p, 0.01)))(self.model.parameters())
        self.amp = castwise.Amp(plan, device=DEVICE, **options)
        self.amp.prepare(self.model, self.optimizer)

    def another(self) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        """Prepare a second optimizer, for a model of one parameter."""
        model = nn.ParameterList([torch.ones(2)])
        self.kept, other = model, torch.optim.SGD(model.parameters(), 0.1)
        self.amp.prepare(model, other)
        return model[0], other

    def backward(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.amp.backward(self.model(X).pow(2).mean() * factor)

    def closure(self, factor: float) -> Callable[[], torch.Tensor]:
        def evaluate() -> torch.Tensor:
            self.backward(factor)
            return torch.ones(())

        return evaluate

    def everything(self) -> list[Any]:
        state = {  # leave out all-zero state, which a kernel makes even when it skips its first step
            index: state
            for index, state in self.optimizer.state_dict()["state"].items()
            if any(bool(v.count_nonzero()) if isinstance(v, torch.Tensor) else v for v in state.values())
        }
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        return copy.deepcopy([*self.model.state_dict().values(), *(p.detach() for p in held), state])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-4),  # a smaller eps is zero in fp16
    "fused": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-4, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
}


HERE = sorted(
    set(PRESETS) - {"tf32", "O0", "O3"}
)  # tf32 is not on every CPU; O0 and O3 duplicate other presets
WAYS = ["step", "max_norm", "joint", "unscaled", "value", "norm", "after", "direct"]


@each_value(2)
@pytest.mark.parametrize(
    ("plan", "way", "maker", "value"),
    [(*row, value) for row, value in pairs(list(itertools.product(HERE, WAYS, MAKERS)), [INF, NAN])],
)
def test_nothing_that_is_not_finite_reaches_weights_masters_and_moments(
    plan: str, way: str, maker: str, value: float
) -> None:
    run = Run(plan, MAKERS[maker])
    p, other = run.another()
    amp, optimizer = run.amp, run.optimizer
    for _ in range(40):  # until the loss scale has settled
        run.backward()
        if not amp.step(optimizer).skipped:
            break
    counted, before = amp.skipped_steps, run.everything()
    run.backward(value if way != "after" else 1.0)
    if way in ("unscaled", "after", "direct"):
        amp.unscale_(optimizer)
    if way == "after":
        run.model[0].weight.grad[0, 0] = value
    if way == "value":
        amp.clip_grad_value_(optimizer, 1.0)
    if way == "norm":
        amp.clip_grad_norm_(optimizer, 1.0)
    if way == "direct":
        optimizer.step()
        assert run.model[0].weight.grad is not None
    elif way == "joint":
        amp.backward(p.sum())
        assert amp.step(optimizer, other).skipped
        assert p.tolist() == [1.0, 1.0]
    else:
        result = amp.step(optimizer, max_norm=1.0 if way == "max_norm" else None)
        assert result.skipped
        assert float(result.found_inf) > 0
    assert same(run.everything(), before)
    assert amp.skipped_steps > counted
    for _ in range(40):
        run.backward()
        if not amp.step(optimizer).skipped:
            break
    assert not same(run.everything(), before)
    amp.close()


@each_value(2)
@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master", "fp16-mixed+loss_scale.init=8", "fp16-master"])
@pytest.mark.parametrize("way", ["norm", "value", "norm of params", "value of params", "both", "unscaled"])
@pytest.mark.parametrize("joint", [False, True])
def test_what_becomes_non_finite_after_clipping_is_seen(plan: str, way: str, joint: bool) -> None:
    run = Run(plan, MAKERS["momentum"])
    _, other = run.another()
    before = run.everything()
    run.backward()
    if way == "unscaled":
        run.amp.unscale_(run.optimizer)
    target = list(run.model.parameters()) if "params" in way else run.optimizer
    if way.startswith("norm") or way in ("both", "unscaled"):
        run.amp.clip_grad_norm_(target, 1.0)
    if way.startswith("value") or way == "both":
        run.amp.clip_grad_value_(target, 1.0)
    run.model[0].weight.grad.fill_(NAN)
    assert (run.amp.step(run.optimizer, other) if joint else run.amp.step(run.optimizer)).skipped
    assert same(run.everything(), before)


@pytest.mark.parametrize("plan", UNSCALED)
def test_steps_are_those_of_a_loop_without_a_guard(plan: str) -> None:
    ends = []
    for nonfinite in ("skip", "raise", "allow"):
        run = Run(plan, nonfinite=nonfinite)
        for number in range(4):
            run.backward()
            assert not run.amp.step(run.optimizer, max_norm=1.0 if number % 2 else None).skipped
        assert run.amp.skipped_steps == 0
        ends.append(run.everything())
        run.amp.close()
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


@each_value(2)
@pytest.mark.parametrize("plan", UNSCALED)
@pytest.mark.parametrize("way", ["step", "max_norm", "joint", "closure", "direct"])
def test_raise_names_the_parameters_before_anything_changed(plan: str, way: str) -> None:
    run = Run(plan, nonfinite="raise")
    run.backward()
    run.amp.step(run.optimizer)
    before = run.everything()
    run.backward()
    run.model[2].bias.grad[1] = NAN

    def closure() -> torch.Tensor:
        run.backward()
        run.model[2].bias.grad[1] = NAN
        return torch.ones(())

    words = (
        r"AdamW\): gradients are not finite: those of 2\.bias; nonfinite='raise' does not allow this\. Weights and "
        r"optimizer are"
    )
    step = {
        "step": lambda: run.amp.step(run.optimizer),
        "max_norm": lambda: run.amp.step(run.optimizer, max_norm=1e9),
        "joint": lambda: run.amp.step(run.optimizer, run.another()[1]),
        "closure": lambda: run.amp.step(run.optimizer, closure=closure),
        "direct": run.optimizer.step,
    }[way]
    with pytest.raises(NonFiniteError, match=words):
        step()
    assert same(run.everything(), before)
    assert run.model[2].bias.grad is not None


def test_raise_under_a_loss_scale_waits_until_none_is_left() -> None:
    run = Run("fp16-mixed+loss_scale.init=8+loss_scale.floor=2", nonfinite="raise")
    for _ in range(2):
        run.backward(INF)
        assert run.amp.step(run.optimizer).skipped
    run.backward(INF)
    with pytest.raises(LossScaleError, match=r"3 times in a row, .*at its floor, 2"):
        run.amp.step(run.optimizer)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("direct", [False, True])
def test_too_many_in_a_row_are_an_error(maker: str, direct: bool) -> None:
    run = Run("bf16-mixed", MAKERS[maker], patience=3)

    def step(factor: float) -> None:
        run.backward(factor)
        run.optimizer.step() if direct else run.amp.step(run.optimizer)

    for factor in (NAN, NAN, 1.0, NAN, NAN):
        step(factor)
    assert run.amp.skipped_steps == 4
    with pytest.raises(
        NonFiniteError, match=r"those of 0\.weight, 0\.bias, 2\.weight, 2\.bias; 3 steps in a row.*patience=3"
    ):
        until_known(lambda: step(NAN), maker == "fused")


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed", "bf16-master", "bf16-true"])
def test_the_error_says_when_it_is_the_weights_that_are_not_finite(plan: str) -> None:
    """Skipped steps do not change the weights, but an earlier update may have damaged them."""
    run = Run(plan, MAKERS["adamw"], patience=2)
    run.backward(1.0)
    run.amp.step(run.optimizer)
    with torch.no_grad():
        run.optimizer.param_groups[0]["params"][0].fill_(NAN)
        next(iter(run.model.parameters())).fill_(NAN)

    def train() -> None:
        for _ in range(60):
            run.backward(1.0)
            run.amp.step(run.optimizer)

    said = r"because weights are not.*0\.weight\. An earlier update"
    with pytest.raises((NonFiniteError, LossScaleError), match=said):
        train()


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("nonfinite", "scale", "times"),
    [("skip", "dynamic=false", 3), ("raise", "dynamic=false", 1), ("skip", "init=8+loss_scale.floor=2", 3)],
)
def test_direct_steps_count_under_a_loss_scale(maker: str, nonfinite: str, scale: str, times: int) -> None:
    run = Run(f"fp16-mixed+loss_scale.{scale}", MAKERS[maker], nonfinite=nonfinite, patience=3)
    before = run.everything()

    def step() -> None:
        run.backward(NAN)
        run.amp.unscale_(run.optimizer)
        run.optimizer.step()

    for _ in range(times - 1):
        step()
    with pytest.raises(LossScaleError, match=r"\d times in a row"):
        until_known(step, maker == "fused")
    assert same(run.everything(), before)
    assert run.model[0].weight.grad is not None


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master", "fp16-mixed+loss_scale.init=8"])
@pytest.mark.parametrize("then", ["clear", "go on", "again"])
def test_gradients_of_a_direct_step_that_raised_come_back_or_go(plan: str, then: str) -> None:
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                self.fails = False
                raise KeyboardInterrupt
            return super().step(closure)

    run = Run(plan, lambda p: Failing(p, 0.125))
    before = run.everything()

    def unscale() -> None:
        if "fp16" in plan:
            run.amp.unscale_(run.optimizer)

    run.backward(NAN)
    unscale()
    run.optimizer.fails = True
    with pytest.raises(KeyboardInterrupt):
        run.optimizer.step()
    if then == "again":
        run.optimizer.step()
        assert run.model[0].weight.grad.isnan().all()
        assert same(run.everything(), before)
        return
    if then == "clear":
        run.optimizer.zero_grad()
    run.amp.backward(run.model(X).pow(2).mean())
    unscale()
    run.optimizer.step()
    assert run.model[0].weight.grad.isfinite().all()
    assert not same(run.everything(), before)


def test_another_optimizers_good_steps_do_not_hide_a_bad_one() -> None:
    run = Run("bf16-mixed", patience=3)
    p, other = run.another()
    for _ in range(2):
        run.backward(NAN)
        run.amp.backward(p.sum())
        run.amp.step(other)
        run.amp.step(run.optimizer)
    run.backward(NAN)
    with pytest.raises(NonFiniteError):
        run.amp.step(run.optimizer)


def test_a_step_that_fails_where_nobody_looks_raises_its_own_error() -> None:
    run = Run("bf16-mixed", nonfinite="allow")
    run.backward()

    def fail(*_: Any) -> None:
        raise OSError("disk")

    run.optimizer.register_step_post_hook(fail)
    with pytest.raises(OSError, match="disk"):
        run.amp.step(run.optimizer)


def test_allow_lets_through_and_a_loss_scale_cannot() -> None:
    run = Run("bf16-mixed", nonfinite="allow")
    run.backward(NAN)
    assert not run.amp.step(run.optimizer).skipped
    assert run.model[0].weight.isnan().any()
    with pytest.raises(
        PlanError, match=r"nonfinite='allow'\): a loss scale is adjusted by skipping.*'skip', 'raise'"
    ):
        castwise.Amp("fp16-mixed", device=DEVICE, nonfinite="allow")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nonfinite": "ignore"}, r"nonfinite='ignore'\) is not allowed\. Allowed: 'skip', 'raise', 'allow'"),
        ({"nonfinite": None}, r"nonfinite=None\) is not allowed"),
        ({"nonfinite": ["skip"]}, r"nonfinite=\['skip'\]\) is not allowed"),
        ({"patience": 0}, r"patience=0\) is not allowed\. Allowed: a whole number >= 1"),
        ({"patience": True}, r"patience=True\) is not allowed"),
    ],
)
def test_values_that_cannot_be_are_refused(options: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        castwise.Amp("bf16-mixed", device=DEVICE, **options)


class Climbing(torch.optim.SGD):
    """Evaluates at the point its first gradients lead to and returns, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        (params,) = [group["params"] for group in self.param_groups]
        with torch.enable_grad():
            value = closure()
        before = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p in params:
                if p.grad is not None:
                    p.add_(p.grad, alpha=0.05)
                self.state[p]["climbs"] = self.state[p].get("climbs", 0) + 1
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, value_before in zip(params, before, strict=True):
                if p.grad is not None:
                    p.copy_(value_before)
                    p.sub_(p.grad, alpha=0.1)
        return value


REPEATED = {
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=5),
    "line search": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=5, line_search_fn="strong_wolfe"),
    "climbing": lambda p: Climbing(p, 0.1),
}
"""Optimizers that evaluate their closure more than once per step."""


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-master", "fp16-mixed", "fp16-master"])
@pytest.mark.parametrize("maker", REPEATED)
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("bad", [1, 2])
def test_an_evaluation_that_is_not_finite_takes_the_step_back(
    plan: str, maker: str, direct: bool, bad: int
) -> None:
    run = Run(castwise.Plan.parse(plan), REPEATED[maker])
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        run.optimizer.zero_grad()
        loss = run.model(X).pow(2).mean() * (NAN if calls == bad else 1.0)
        run.amp.backward(loss)
        if direct:
            run.amp.unscale_(run.optimizer)
        return loss

    def step() -> None:
        if direct:
            run.optimizer.step(closure)
        else:
            run.amp.step(run.optimizer, closure=closure)

    calls = 10
    step()
    assert run.amp.skipped_steps == 0
    before, calls = run.everything(), 0
    step()
    assert calls == bad
    assert same(run.everything(), before)
    assert run.amp.skipped_steps == 1
    step()
    assert not same(run.everything(), before)


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-master"])
@pytest.mark.parametrize("maker", REPEATED)
@pytest.mark.parametrize("options", [{"nonfinite": "raise"}, {"patience": 1}])
def test_an_evaluation_that_is_an_error_changes_nothing(plan: str, maker: str, options: Any) -> None:
    run, calls = Run(castwise.Plan.parse(plan), REPEATED[maker], **options), 0
    before = run.everything()

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        run.backward(NAN if calls == 2 else 1.0)
        return torch.ones(())

    with pytest.raises(NonFiniteError):
        run.optimizer.step(closure)
    run.model(X)
    assert same(run.everything(), before)


def scaled(init: float) -> castwise.Plan:
    policy = castwise.LossScale(init=init)
    return dataclasses.replace(castwise.Plan.parse("fp16-mixed"), loss_scale=policy)


@pytest.mark.parametrize("maker", REPEATED)
def test_a_step_that_no_scale_helps_lowers_it_once(maker: str) -> None:
    run = Run(scaled(1024.0), REPEATED[maker])

    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = run.model(X).pow(2).mean()
        # Only the gradients contain NaN.
        run.amp.backward(loss + 0.0 * (run.model[0].weight.sum() * 0.0).sqrt())
        run.amp.unscale_(run.optimizer)
        return loss

    run.optimizer.step(closure)
    run.backward()
    assert (run.amp.skipped_steps, run.amp.scaler.get_scale()) == (1, 512.0)


@pytest.mark.parametrize("maker", REPEATED)
def test_a_closure_that_raises_while_it_is_evaluated_again_leaves_nothing_behind(maker: str) -> None:
    run, calls = Run(scaled(2.0**24), REPEATED[maker]), 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyError("a batch")
        run.optimizer.zero_grad()
        loss = run.model(X).pow(2).mean()
        run.amp.backward(loss)
        run.amp.unscale_(run.optimizer)
        return loss

    with pytest.raises(KeyError):
        run.optimizer.step(closure)
    run.backward(INF)  # skipped by a user's own check, which counts as a new skip
    run.amp.clip_grad_norm_(run.optimizer, 1.0)
    run.backward()
    assert run.amp.skipped_steps == 1
    calls = 2
    run.optimizer.step(closure)
    assert run.amp.scaler.get_scale() < 2.0**23


@pytest.mark.parametrize("maker", REPEATED)
def test_gradients_that_a_closure_clears_of_another_optimizer_are_no_skipped_steps(maker: str) -> None:
    run = Run(scaled(2.0**20), REPEATED[maker])
    parameter, other = run.another()

    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        other.zero_grad()
        loss = run.model(X).pow(2).mean() * parameter.prod()
        run.amp.backward(loss)
        run.amp.unscale_(run.optimizer)
        run.amp.unscale_(other)
        return loss

    run.optimizer.step(closure)
    assert run.amp.scaler.get_scale() < 2.0**20
    assert run.amp.skipped_steps == 0


@pytest.mark.parametrize("maker", [*REPEATED, "adam"])
def test_gradients_from_before_a_closure_are_stepped_or_skipped_whole(maker: str) -> None:
    """The closure runs the second of two microbatches; the gradients of the first are not computed again."""
    makers = {**REPEATED, "adam": lambda p: torch.optim.Adam(p, 0.01)}
    run = Run(scaled(2.0**24), makers[maker])
    before = run.everything()

    def closure() -> torch.Tensor:
        run.amp.backward(run.model(X).pow(2).mean())
        run.amp.unscale_(run.optimizer)
        return torch.ones(())

    run.amp.backward(run.model(X).pow(2).mean())
    run.optimizer.step(closure)
    assert run.amp.skipped_steps == 1
    assert same(run.everything(), before)


@pytest.mark.parametrize("plan", ["fp32", "bf16-master", "fp16-mixed"])
@pytest.mark.parametrize("first", ["bad", "converged"])
def test_a_step_that_evaluated_once_is_no_reason_to_keep_nothing(plan: str, first: str) -> None:
    run = Run(castwise.Plan.parse(plan), REPEATED["lbfgs"])
    factors = [NAN if first == "bad" else 0.0, 1.0, 1.0, NAN]

    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = run.model(X).pow(2).mean() * (factors.pop(0) if factors else 1.0)
        run.amp.backward(loss)
        run.amp.unscale_(run.optimizer)
        return loss

    run.optimizer.step(closure)
    before = [p.detach().clone() for p in run.model.parameters()]
    run.optimizer.step(closure)
    assert run.amp.skipped_steps == (2 if first == "bad" else 1)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_the_very_gradients_in_another_model_are_not_stepped_on() -> None:
    run, other = Run("fp16-mixed"), net()
    shared = torch.optim.SGD(other.parameters(), 0.1)
    run.backward()
    for theirs, ours in zip(other.parameters(), run.model.parameters(), strict=True):
        theirs._grad = ours.grad
    with pytest.raises(StateError, match=r"call amp\.unscale_ on the other optimizer first"):
        shared.step()
    run.amp.unscale_(run.optimizer)
    shared.step()


@pytest.mark.parametrize("maker", REPEATED)
def test_allowed_gradients_may_be_unscaled_in_a_closure(maker: str) -> None:
    run = Run("fp32", REPEATED[maker], nonfinite="allow")

    def closure() -> torch.Tensor:
        run.backward()
        run.amp.unscale_(run.optimizer)
        return torch.ones(())

    before = run.everything()
    run.optimizer.step(closure)
    assert not same(run.everything(), before)


@pytest.mark.parametrize("maker", REPEATED)
@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-master"])
def test_an_evaluation_that_overflows_is_made_again_at_a_smaller_scale(plan: str, maker: str) -> None:
    """The user calls the optimizer's step, perhaps only once: a plain LBFGS step of a thousand iterations."""
    large = dataclasses.replace(castwise.Plan.parse(plan), loss_scale=castwise.LossScale(init=2.0**24))
    run = Run(large, REPEATED[maker])
    before = run.everything()

    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = run.model(X).pow(2).mean()
        run.amp.backward(loss)
        run.amp.unscale_(run.optimizer)
        return loss

    run.optimizer.step(closure)
    assert run.amp.skipped_steps == 0
    assert run.amp.scaler.get_scale() < 2.0**24
    assert not same(run.everything(), before)


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master"])
@pytest.mark.parametrize("keyword", [False, True])
def test_a_framework_that_steps_by_a_closure_is_guarded(plan: str, keyword: bool) -> None:
    run = Run(plan)

    for factor in (1.0, NAN, 1.0):
        before = run.everything()
        if keyword:
            run.optimizer.step(closure=run.closure(factor))
        else:
            run.optimizer.step(run.closure(factor))
        assert same(run.everything(), before) is (factor != 1.0)
    assert run.amp.skipped_steps == 1


class Outside(SkipsInit):
    """Wraps an optimizer without having hooks itself, as Lookahead, TRAC and Schedule-Free's wrapper do."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.inner.state_dict()


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("way", ["closure", "step", "amp"])
def test_steps_inside_an_optimizer_without_hooks_are_guarded(plan: str, way: str) -> None:
    run = Run(plan, lambda p: Outside(torch.optim.SGD(p, 0.01, momentum=0.9)))

    for factor in (1.0, NAN, 1.0):
        before = run.everything()
        if way == "closure":
            run.optimizer.step(run.closure(factor))
        else:
            run.closure(factor)()
            run.amp.step(run.optimizer) if way == "amp" else run.optimizer.step()
        assert same(run.everything(), before) is (factor != 1.0)
    assert run.amp.skipped_steps == 1


@pytest.mark.parametrize("plan", ["bf16-mixed", "fp16-mixed"])
def test_hooks_behind_direct_steps_do_not_pile_up(plan: str) -> None:
    run = Run(plan)
    hooks = run.optimizer._optimizer_step_post_hooks
    counts = set()
    for _ in range(3):
        run.backward(INF)
        run.amp.unscale_(run.optimizer)
        run.optimizer.step()
        counts.add(len(hooks))
    assert len(counts) == 1


@pytest.mark.parametrize("returns", [False, True])
def test_another_ranks_verdict_skips_here_too(returns: bool) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.1)
    guard = StepGuard(DEVICE, refuse=False, patience=3, reduce=another_ranks_flag(returns))
    p.grad = torch.ones(2)
    result = guard.take(optimizer)
    assert result.skipped
    assert float(result.found_inf) == 1.0
    assert p.tolist() == [1.0, 1.0]


@pytest.mark.sparse
def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
    amp = castwise.Amp("fp32", device=DEVICE)
    amp.prepare(table, optimizer)
    for factor in (1.0, NAN, 1.0):
        before = table.weight.detach().clone()
        amp.backward(table(torch.tensor([1, 1, 3])).sum() * factor)
        assert amp.step(optimizer).skipped is (factor != 1.0)
        assert torch.equal(table.weight, before) is (factor != 1.0)
        optimizer.zero_grad()


def test_a_flag_of_steps_not_made_is_forgotten() -> None:
    run = Run("bf16-mixed")
    run.backward(NAN)
    run.amp.clip_grad_norm_(run.optimizer, 1.0)
    run.backward()
    assert not run.amp.step(run.optimizer).skipped


class Reads(TorchDispatchMode):
    """Counts reads of device values by the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == DEVICE
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-master"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_guarded_step_reads_nothing_back(plan: str, maker: str) -> None:
    run = Run(plan, MAKERS[maker])
    run.backward()
    run.amp.unscale_(run.optimizer)
    run.amp.step(run.optimizer)
    run.backward()
    alone = torch.optim.SGD([p := nn.Parameter(torch.ones(1))])
    with Reads() as plain:
        MAKERS[maker]([q := nn.Parameter(torch.ones(1))])
        q.grad = torch.ones(1)
    assert plain.count == 0
    by_hand = Run("fp32", MAKERS[maker])
    by_hand.backward()
    by_hand.optimizer.step()
    with Reads() as own:  # AdamW reads its own step counters
        by_hand.optimizer.step()
    with Reads() as reads:
        run.amp.unscale_(run.optimizer)
        assert not run.amp.step(run.optimizer).skipped
    p.grad = torch.ones(1)
    alone.step()
    # The host reads the flag to skip a step that the kernel cannot skip.
    flag = DEVICE != "cpu" and maker != "fused"
    assert reads.count <= own.count + flag


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1.0, NAN])
def test_a_fused_optimizer_on_a_gpu_decides_without_the_host(factor: float) -> None:
    model = net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    amp = castwise.Amp("bf16-mixed", device="cuda", patience=100)
    amp.prepare(model, optimizer)
    x, size = X.cuda(), torch.tensor(factor, device="cuda")
    before = [p.detach().clone() for p in model.parameters()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            amp.backward(model(x).pow(2).mean() * size)
            amp.step(optimizer)
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert amp.skipped_steps == (0 if factor == 1.0 else 4)
    assert all(map(torch.equal, before, model.parameters())) is (factor != 1.0)


# --- late parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan", ["fp16-mixed+loss_scale.init=64", "fp16-master+loss_scale.init=64", "bf16-master"]
)
@pytest.mark.parametrize("way", ["add", "thaw", "add after backward", "add after unscale"])
def test_parameters_that_join_between_steps(plan: str, way: str) -> None:
    model = net()
    late = list(model[2].parameters())
    first = list(model[0].parameters())
    if way == "thaw":
        for parameter in late:
            parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([*first, *late] if way == "thaw" else first, 0.1)
    amp = castwise.Amp(plan, device=DEVICE)
    amp.prepare(model, optimizer)
    amp.backward(model(X).pow(2).mean())
    assert not amp.step(optimizer).skipped
    model.zero_grad()
    before = {key: value.clone() for key, value in amp.model_state_dict(model).items()}

    def join() -> None:
        if way == "thaw":
            for parameter in late:
                parameter.requires_grad_()
        else:
            optimizer.add_param_group({"params": late})

    if way in ("add", "thaw"):
        join()
    amp.backward(model(X).pow(2).mean())
    want = [p.grad.float().clone() / amp.get_scale() for p in late]
    if way == "add after backward":
        join()
    if way == "add after unscale":
        amp.unscale_(optimizer)
        join()
    assert not amp.step(optimizer).skipped
    after = amp.model_state_dict(model)
    for key, grad in zip(("2.weight", "2.bias"), want, strict=True):
        torch.testing.assert_close(after[key], before[key] - 0.1 * grad, rtol=1e-5, atol=1e-7)
    amp.close()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("maker", ["fused", "momentum"])
def test_a_device_that_is_not_the_hosts(maker: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: a fused kernel receives the flag, and for other optimizers the host reads it."""
    monkeypatch.setattr("castwise.core.scaler.step_guard.view_on_host", lambda flag: None)
    for module in ("step_guard", "watch"):
        monkeypatch.setattr(f"castwise.core.scaler.{module}.read_on_host", lambda flags: None)
    run = Run("bf16-mixed", MAKERS[maker], patience=3)
    for factor in (1.0, NAN, 1.0, NAN, INF):
        run.backward(factor)
        before = run.everything()
        if direct:
            run.optimizer.step()
        else:
            assert run.amp.step(run.optimizer).skipped is (factor != 1.0)
        assert same(run.everything(), before) is (factor != 1.0)
        assert not hasattr(run.optimizer, "found_inf")
    assert run.amp.skipped_steps == 3

    def go_on() -> None:
        for _ in range(3):
            run.backward(NAN)
            run.amp.step(run.optimizer)

    if not direct:
        with pytest.raises(NonFiniteError, match="3 steps in a row"):
            go_on()
