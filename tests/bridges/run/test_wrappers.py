"""``castwise run`` on optimizers that wrap others: the results of the loop by hand, also with overflows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from castwise.commands.cli import main
from tests.processes import Forked
from tests.soak import each_value

HEAD = """
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
torch.manual_seed(0)
X, Y, ce = torch.randn(32, 8), torch.randint(0, 4, (32,)), nn.CrossEntropyLoss()
m = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
"""
LOOP = """
for _ in range(16): loss = ce(m(X), Y); o.zero_grad(); loss.backward(); o.step(); print(loss.item())
"""
WRAPPERS = {
    "several in a list": """
class W(Optimizer):
    def __init__(s, *inner): s.inner = list(inner); super().__init__([g for i in inner for g in i.param_groups], {})
    def step(s, closure=None): [i.step() for i in s.inner]
o = W(SGD(m[0].parameters(), 0.1), Adam(m[2].parameters(), 0.01))
""",
    "several by name, without hooks": """
class W(Optimizer):
    def __init__(s, **inner): s.inner, s.state, s.defaults = inner, {}, {}
    param_groups = property(lambda s: [g for i in s.inner.values() for g in i.param_groups])
    def step(s, closure=None): [i.step() for i in s.inner.values()]
    def zero_grad(s): [i.zero_grad() for i in s.inner.values()]
o = W(a=SGD(m[0].parameters(), 0.1), b=Adam(m[2].parameters(), 0.01))
""",
    "slow weights, as timm has them": """
class W(Optimizer):
    def __init__(s, base):
        s._optimizer_step_pre_hooks, s._optimizer_step_post_hooks = {}, {}
        s.base, s.param_groups, s.defaults, s.state, s.n = base, base.param_groups, base.defaults, {}, 0
        s.slow = [p.detach().clone() for g in s.param_groups for p in g["params"]]
    @torch.no_grad()
    def step(s, closure=None):
        s.base.step(closure); s.n += 1
        for p, q in zip([p for g in s.param_groups for p in g["params"]], s.slow if s.n % 2 == 0 else []): q.add_(p - q, alpha=0.5); p.copy_(q)
o = W(SGD(m.parameters(), 0.1))
""",
    "rates by layer, as LARS has them": """
class W(Optimizer):
    def __init__(s, optim): super().__init__(optim.param_groups, {}); s.optim = optim; s.param_groups = optim.param_groups
    @torch.no_grad()
    def step(s, closure=None):
        for p in [p for p in s.param_groups[0]["params"] if p.grad is not None]: p.grad.mul_(0.1 * p.norm() / p.grad.norm())
        s.optim.step()
o = W(SGD(m.parameters(), 0.1))
""",
    "no optimizer itself": """
class W:
    def __init__(s, optim): s.optim, s.param_groups = optim, optim.param_groups
    def step(s): s.optim.step()
    def zero_grad(s): s.optim.zero_grad()
o = W(SGD(m.parameters(), 0.1))
""",
    "groups of its own": """
class W(Optimizer):
    def __init__(s, params, base): params = list(params); super().__init__(params, {}); s.inner = {"x": [base(params)]}
    def step(s, closure=None): s.inner["x"][0].step()
o = W(m.parameters(), lambda p: SGD(p, 0.1))
""",
    "behind a function": """
class W(Optimizer):
    def __init__(s, base): super().__init__(base.param_groups, {}); s.inner = lambda: base.step()
    def step(s, closure=None): s.inner()
o = W(SGD(m.parameters(), 0.1))
""",
    "made from the groups of another that stays": """
class W(SGD):
    def __init__(s, params): super(type(s), s).__init__(params)
base = SGD(m.parameters(), 0.1, momentum=0.9); o = W(base.param_groups)
""",
    "in the other's attributes": """
class W(SGD):
    def __init__(s, base): s.__dict__ = base.__dict__
    def step(s, closure=None): return SGD.step(s, closure)
o = W(SGD(m.parameters(), 0.1))
""",
}
LATE = "in the other's attributes"
"""This optimizer is detected only in its first step, so the plan starts after that step."""
SAM = """
class Sam(Optimizer):
    def __init__(s, params, base, rho=0.05, **options):
        super().__init__(params, dict(rho=rho, **options)); s.base_optimizer = base(s.param_groups, **options); s.param_groups = s.base_optimizer.param_groups
    @torch.no_grad()
    def first_step(s, zero_grad=False):
        ps = [p for g in s.param_groups for p in g["params"]]; norm = torch.stack([p.grad.norm() for p in ps]).norm()
        for p in ps: s.climb(p, s.state[p], p.grad * (0.05 / (norm + 1e-12)))
        if zero_grad: s.zero_grad()
    @torch.no_grad()
    def back(s):
        for g in s.param_groups:
            for p in g["params"]: s.descend(p, s.state[p])
    def second_step(s, zero_grad=False):
        s.back(); s.base_optimizer.step()
        if zero_grad: s.zero_grad()
"""
MOVES = {
    "a copy put back": """
    def climb(s, p, state, by): state["old"] = p.data.clone(); p.add_(by)
    def descend(s, p, state): p.data = state["old"]
""",
    "a difference": """
    def climb(s, p, state, by): state["by"] = by; p.add_(by)
    def descend(s, p, state): p.sub_(state["by"])
""",
    "a difference, through data": """
    def climb(s, p, state, by): state["by"] = by; p.data.add_(by)
    def descend(s, p, state): p.data.sub_(state["by"])
""",
}
TWICE = """
o = Sam(m.parameters(), SGD, lr=0.1, momentum=0.9)
for _ in range(24):
    loss = ce(m(X), Y); loss.backward(); o.first_step(zero_grad=True); print(loss.item())
    loss = ce(m(X), Y); loss.backward(); o.second_step(zero_grad=True); print(loss.item())
"""
BY_HAND = """
o = Sam(m.parameters(), SGD, lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
def backward():
    with torch.autocast("cpu", torch.float16): out = m(X)
    loss = ce(out.float(), Y); scaler.scale(loss).backward(); scaler.unscale_(o); print(loss.item())
    return not any(scaler._per_optimizer_states[id(o)]["found_inf_per_device"].values())
for _ in range(24):
    climbs = backward()
    o.first_step(zero_grad=True) if climbs else o.zero_grad()
    scaler.update()
    steps = backward() and climbs  # after an overflow the second pass only tries the smaller scale
    if steps: o.second_step(zero_grad=True)
    elif climbs: o.back(); o.zero_grad()
    else: o.zero_grad()
    scaler.update()
"""


def _python(words: list[str]) -> None:
    runpy.run_path(words[0], run_name="__main__")


def _printed(process: Forked) -> list[float]:
    assert process.wait(120) == 0, process.said("err")
    return [float(word) for word in process.said("out").split()]


def _run(plan: str, folder: Path) -> Forked:
    return Forked(main, ["run", "--plan", plan, "train.py"], folder, folder / plan[:4])


@each_value()
@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-master", "bf16-mixed", "bf16-master"])
@pytest.mark.parametrize("which", WRAPPERS)
def test_an_optimizer_around_another_trains_by_the_plan(which: str, plan: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + WRAPPERS[which] + LOOP)
    plain = _printed(Forked(_python, ["train.py"], tmp_path, tmp_path / "plain"))
    assert _printed(_run("fp32", tmp_path)) == plain
    ran = _run(plan, tmp_path)
    torch.testing.assert_close(found := _printed(ran), plain, rtol=5e-3, atol=5e-3)
    assert found != plain  # the plan had an effect
    late = "castwise run: W made its first step as it would without castwise: it does not call Optimizer.__init__, so it was detected then\n"
    expected = f"castwise run: Sequential trains under {plan}\n"
    assert ran.said("err") == ((late + expected) if which == LATE else expected)


@each_value()
@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-master"])
@pytest.mark.parametrize("which", WRAPPERS)
def test_an_overflow_around_another_skips_each_step_once(which: str, plan: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + WRAPPERS[which] + LOOP)
    ran = _run(f"{plan}+loss_scale.init={2**28}", tmp_path)
    found = _printed(ran)
    first = found[which == LATE]
    skipped = [loss for loss in found if loss == first]
    assert 5 < len(skipped) < 14
    assert found[-1] < found[0]
    counts = [
        f"{(len(skipped) - 1) * each} steps were skipped" for each in (1, 2)
    ]  # each of two optimizers counts its step
    assert counts["several by name" in which] in ran.said("err")


@each_value(2)
@pytest.mark.parametrize("scale", [2**10, 2**28])
@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-master"])
@pytest.mark.parametrize("moves", MOVES)
def test_sam_is_the_recipe_by_hand(moves: str, plan: str, scale: int, tmp_path: Path) -> None:
    """Results are bitwise equal; if the first gradients overflow, the whole step is skipped and no weight is NaN."""
    (tmp_path / "train.py").write_text(HEAD + SAM + MOVES[moves] + TWICE)
    (tmp_path / "hand.py").write_text(HEAD + SAM + MOVES[moves] + BY_HAND.replace("SCALE", str(scale)))
    by_hand = _printed(Forked(_python, ["hand.py"], tmp_path, tmp_path / "hand"))
    ran = _run(f"{plan}+loss_scale.init={scale}", tmp_path)
    assert _printed(ran) == by_hand
    assert ("skipped" in ran.said("err")) is (scale > 2**16)
    assert "Warning" not in ran.said("err")


HAND = {
    "before each step": "[p.detach().sub_(p.grad, alpha=0.1) for p in m.parameters()]; o.step()",
    "after each step": "o.step(); [p.detach().sub_(p.grad, alpha=0.1) for p in m.parameters()]",
    "in place of later steps": "[p.detach().sub_(p.grad, alpha=0.1) for p in m.parameters()] if _ % 3 else o.step()",
    "by a wrapper that is no optimizer": "w.step()",
}
WRAPPER = """
class W:
    def __init__(s, base): s.base = base
    def step(s): s.base.step(); [p.detach().sub_(p.grad, alpha=0.1) for p in m.parameters()]
w = W(o)
"""


@pytest.mark.parametrize("when", HAND)
def test_weights_that_a_loop_writes_by_hand_survive_an_overflow(when: str, tmp_path: Path) -> None:
    loop = LOOP.replace("o.step()", HAND[when]).replace("range(16)", "range(48)")
    if " if " in HAND[when]:
        loop = loop.replace("[p.detach()", "([p.detach()").replace("o.step();", "o.step());")
    (tmp_path / "train.py").write_text(HEAD + "o = SGD(m.parameters(), 0.0)" + WRAPPER + loop)
    found = _printed(_run(f"fp16-mixed+loss_scale.init={2**28}", tmp_path))
    assert found[-1] < found[0]


UNPREPARED = {
    "around another, and uses its gradients": """
class W(Optimizer):
    param_groups = property(lambda s: s.base.param_groups)
    def __init__(s, base): s._optimizer_step_pre_hooks, s._optimizer_step_post_hooks, s.base = {}, {}, base; s._patch_step_function()
    def zero_grad(s): s.base.zero_grad()
    @torch.no_grad()
    def step(s, closure=None):
        before = [(p, p.grad.clone()) for g in s.param_groups for p in g["params"] if p.grad is not None]
        s.base.step()
        for p, grad in before: p.sub_(grad, alpha=0.01)
o = W(SGD(m.parameters(), 0.1))
""",
    "beside another, which is idle": "idle = SGD(m.parameters(), 0.1); o = Adam(m.parameters(), 0.01)\n",
    "after another, which is kept": "old = SGD(m.parameters(), 0.1); ce(m(X), Y).backward(); old.step(); o = Adam(m.parameters(), 0.01)\n",
}


@each_value()
@pytest.mark.parametrize("plan", ["fp16-mixed", "fp16-master"])
@pytest.mark.parametrize("which", UNPREPARED)
def test_an_overflow_reaches_no_weight_through_an_optimizer_that_is_not_prepared(
    which: str, plan: str, tmp_path: Path
) -> None:
    if plan == "fp16-master" and "around" not in which:
        pytest.skip("low weights can have masters in one optimizer only")
    (tmp_path / "train.py").write_text(HEAD + UNPREPARED[which] + LOOP.replace("16", "32"))
    ran = _run(f"{plan}+loss_scale.init={2**28}", tmp_path)
    found = _printed(ran)
    assert found[-1] < found[0]
    skipped = sum(loss == found[0] for loss in found)
    assert 5 < skipped < 14
    assert f"{skipped - 1} steps were skipped" in ran.said("err") or "after" in which


def test_an_optimizer_that_comes_too_late_for_masters_is_told(tmp_path: Path) -> None:
    late = (
        "old = SGD(m.parameters(), 0.1); ce(m(X), Y).backward(); old.step(); o = Adam(m.parameters(), 0.01)\n"
    )
    (tmp_path / "train.py").write_text(HEAD + late + LOOP)
    ran = _run("fp16-master", tmp_path)
    assert ran.wait(120) == 1
    assert "Adam steps as it would without castwise: the plan fp16-master keeps fp32 masters of" in ran.said(
        "err"
    )
    assert "Make all optimizers before the model's first call" in ran.said("err")


def test_a_step_that_sam_skips_within_a_closure_is_counted(tmp_path: Path) -> None:
    step = """
    def step(s, closure): s.first_step(zero_grad=True); torch.enable_grad()(closure)(); s.second_step()
"""
    loop = """
o = Sam(m.parameters(), SGD, lr=0.1, momentum=0.9)
def loss(): each = ce(m(X), Y); each.backward(); return each
for _ in range(24): each = loss(); o.step(loss); o.zero_grad(); print(each.item())
"""
    (tmp_path / "train.py").write_text(HEAD + SAM + MOVES["a copy put back"] + step + loop)
    ran = _run(f"fp16-mixed+loss_scale.init={2**28}", tmp_path)
    found = _printed(ran)
    skipped = sum(loss == found[0] for loss in found) - 1
    assert 0 < skipped < 8
    assert f"castwise run: {skipped} step{'s were' if skipped > 1 else ' was'} skipped" in ran.said("err")
