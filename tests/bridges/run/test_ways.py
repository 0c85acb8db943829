"""``castwise run`` on training loops of many forms: equal results under fp32, close ones under fp16."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from castwise.commands.cli import main
from tests.processes import Forked
from tests.soak import each_value, every

HEAD = """
import torch
from torch import nn
def net(): return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
torch.manual_seed(0)
X, Y, ce = torch.randn(32, 8), torch.randint(0, 4, (32,)), nn.CrossEntropyLoss()
m = net()
o = torch.optim.SGD(m.parameters(), 0.1)
def step(): loss = ce(m(X), Y); o.zero_grad(); loss.backward(); o.step(); print(loss.item())
"""
WAYS = {
    "checkpointed": """
from torch.utils.checkpoint import checkpoint
for reentrant in (False, True):
    x = X.clone().requires_grad_(True)
    loss = ce(checkpoint(m, x, use_reentrant=reentrant), Y); loss.backward(); o.step(); print(loss.item(), x.grad.abs().sum().item())
""",
    "compiled, and compiled in place": """
c = torch.compile(m, backend="aot_eager"); loss = ce(c(X), Y); loss.backward(); o.step(); print(loss.item())
m = net(); o = torch.optim.SGD(m.parameters(), 0.1); m.compile(backend="aot_eager"); step(); step()
""",
    "stepping in backward's hooks": """
del o; ops = {p: torch.optim.SGD([p], 0.1) for p in m.parameters()}
def hook(p): ops[p].step(); ops[p].zero_grad()
for p in m.parameters(): p.register_post_accumulate_grad_hook(hook)
for _ in range(3): loss = ce(m(X), Y); loss.backward(); print(loss.item())
""",
    "a penalty on gradients": """
for _ in range(2):
    x = X.clone().requires_grad_(True); s = m(x); g, = torch.autograd.grad(s.sum(), x, create_graph=True)
    loss = ((g.norm(dim=1) - 1) ** 2).mean() - s.mean(); o.zero_grad(); loss.backward(); o.step(); print(loss.item(), g.norm().item())
""",
    "learning to learn": """
from torch.func import functional_call
for _ in range(2):
    p = dict(m.named_parameters()); g = torch.autograd.grad(ce(functional_call(m, p, X), Y), [*p.values()], create_graph=True)
    loss = ce(functional_call(m, {k: v - 0.1 * d for (k, v), d in zip(p.items(), g)}, X), Y)
    o.zero_grad(); loss.backward(); o.step(); print(loss.item())
""",
    "errors that are caught": """
for x in (X, X[:, :3], X):
    try: loss = ce(m(x), Y); o.zero_grad(); loss.backward(); o.step(); print(loss.item())
    except RuntimeError: print("caught")
""",
    "averaged weights": """
from torch.optim.swa_utils import AveragedModel
e = AveragedModel(m); step(); e.update_parameters(m)
with torch.no_grad(): print(e(X).abs().sum().item())
""",
    "in a thread": """
import threading
t = threading.Thread(target=step); t.start(); t.join(); step()
""",
    "layers thawed later": """
m[0].requires_grad_(False); o = torch.optim.SGD(m[2].parameters(), 0.1); step()
m[0].requires_grad_(True); o.add_param_group({"params": m[0].parameters()}); step(); step()
""",
    "parts called by themselves": """
class M(nn.Module):
    def __init__(s): super().__init__(); s.e, s.d = nn.Linear(8, 16), nn.Linear(16, 4)
m = M(); o = torch.optim.AdamW(m.parameters(), 1e-2)
for _ in range(3): loss = ce(m.d(torch.tanh(m.e(X))), Y); o.zero_grad(); loss.backward(); o.step(); print(loss.item())
""",
    "saved whole and loaded": """
import io
step(); f = io.BytesIO(); torch.save(m.state_dict(), f); torch.save(o.state_dict(), b := io.BytesIO()); f.seek(0); b.seek(0)
m = net(); m.load_state_dict(torch.load(f)); o = torch.optim.SGD(m.parameters(), 0.1); o.load_state_dict(torch.load(b)); step()
""",
    "scripted afterwards": """
step(); s = torch.jit.script(m); print(s(X).sum().item()); step()
""",
    "an optimizer around another": """
class SAM(torch.optim.Optimizer):
    def __init__(s, params): super().__init__(params, dict(rho=0.05)); s.base = torch.optim.SGD(s.param_groups, 0.1); s.param_groups = s.base.param_groups
    @torch.no_grad()
    def climb(s):
        ps = [p for g in s.param_groups for p in g["params"]]; n = torch.stack([p.grad.norm() for p in ps]).norm()
        for p in ps: s.state[p]["e"] = p.grad * (0.05 / n); p.add_(s.state[p]["e"])
        s.zero_grad()
    @torch.no_grad()
    def descend(s):
        for g in s.param_groups:
            for p in g["params"]: p.sub_(s.state[p]["e"])
        s.base.step(); s.zero_grad()
o = SAM(m.parameters())
for _ in range(3): loss = ce(m(X), Y); loss.backward(); o.climb(); ce(m(X), Y).backward(); o.descend(); print(loss.item())
""",
    "gradients that are replaced": """
for _ in range(3):
    loss = ce(m(X), Y); o.zero_grad(); loss.backward()
    for p in m.parameters(): p.grad = torch.nan_to_num(p.grad * 0.5)
    o.step(); print(loss.item())
""",
    "surgery on gradients of two tasks": """
for _ in range(3):
    parts = []
    for w in (1.0, 0.5):
        o.zero_grad(); loss = ce(m(X), Y) * w; loss.backward(); parts.append([p.grad.clone() for p in m.parameters()])
    for p, a, b in zip(m.parameters(), *parts): p.grad = a + b
    o.step(); print(loss.item())
""",
    "weights moved by differences": """
fast = net(); inner = torch.optim.SGD(fast.parameters(), 0.1)
for _ in range(3):
    fast.load_state_dict(m.state_dict())
    for _ in range(2): loss = ce(fast(X), Y); inner.zero_grad(); loss.backward(); inner.step()
    ce(m(X), Y).backward(); o.zero_grad()
    for p, q in zip(m.parameters(), fast.parameters()): p.grad = p.detach() - q.detach()
    o.step(); print(loss.item())
""",
    "sparse gradients": """
e, h = nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 4); m, X = nn.Sequential(e, h), torch.randint(0, 20, (32, 3))
a, o = torch.optim.SparseAdam(e.parameters(), 1e-2), torch.optim.Adam(h.parameters(), 1e-2)
for _ in range(3): e.zero_grad(); step(); a.step()
""",
}  # fmt: skip


@every(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_loop_written_this_way_gives_the_same_numbers(way: str, tmp_path: Path) -> None:
    _compare(WAYS[way], tmp_path)


def _compare(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + text)
    plain = _printed(Forked(_python, ["train.py"], tmp_path, tmp_path / "plain"))
    assert _printed(_run("fp32", tmp_path)) == plain
    low = _printed(_run("fp16-mixed+loss_scale.init=1024", tmp_path))
    torch.testing.assert_close(low, plain, rtol=5e-3, atol=1e-3)
    assert low != plain  # the plan had an effect


def _python(words: list[str]) -> None:
    runpy.run_path(words[0], run_name="__main__")


def _run(plan: str, folder: Path) -> Forked:
    return Forked(main, ["run", "--plan", plan, "train.py"], folder, folder / plan[:4])


def _printed(process: Forked) -> list[float]:
    assert process.wait(120) == 0, process.said("err")
    return [float(word) for word in process.said("out").split() if word != "caught"]


READS = {
    "hooks": """
for p in m.parameters(): p.register_hook(lambda g: g.clamp(-0.01, 0.01))
m[0].weight.register_hook(lambda g: [g.mul_(0.5)] and None)
m[2].register_full_backward_hook(lambda _, given, got: print(*[g.norm().item() for g in (*given, *got)]))
m[2].register_full_backward_pre_hook(lambda _, got: (got[0] * 0.5,))
for _ in range(3): step()
""",
    "hooks on parameters": """
seen = []
def hook(p): seen.append(p.grad.norm().item()); p.grad.clamp_(-0.01, 0.01)
for p in m.parameters(): p.register_post_accumulate_grad_hook(hook)
for _ in range(3): step(); print(sum(seen))
""",
    "hooks that clip and step": """
ops = {p: torch.optim.SGD([p], 0.1) for p in m.parameters()}; seen = []; del o
def hook(p): seen.append(nn.utils.clip_grad_norm_([p], 0.02).item()); ops[p].step(); ops[p].zero_grad()
for p in m.parameters(): p.register_post_accumulate_grad_hook(hook)
for _ in range(3): loss = ce(m(X), Y); loss.backward(); print(loss.item(), sum(seen))
""",
    "what is below no leaf": """
for _ in range(3):
    out = m(X); out.retain_grad(); loss = ce(out, Y); o.zero_grad(); loss.backward(retain_graph=True); print(out.grad.norm().item())
    (loss * 0.5).backward(); o.step(); print(loss.item(), out.grad.norm().item())
""",
    "what an error left": """
for _ in range(3):
    loss = ce(m(X), Y); loss.backward()
    try: loss.backward()
    except RuntimeError: print("caught")
    o.step(); print(loss.item(), m[0].weight.grad.norm().item())
""",
}  # fmt: skip


@every(2)
@pytest.mark.parametrize("what", READS)
def test_gradients_are_true_wherever_the_script_reads_them(what: str, tmp_path: Path) -> None:
    _compare(READS[what], tmp_path)


OUTSIDE = {
    "parts": "m = M(); o = torch.optim.SGD(m.parameters(), 0.1); step(); print(m.e(X).sum().item(), m.d(m.e(X)).sum().item()); step()",
    "a copy": "import copy\nm = M(); o = torch.optim.SGD(m.parameters(), 0.1); step(); m.e(X); c = copy.deepcopy(m); print(c(X).sum().item())",
    "fp64": "m = M().double(); o = torch.optim.SGD(m.parameters(), 0.1); X = X.double(); step(); step()",
}
"""Code that must still work under a plan that stores weights low."""
_M = """
class M(nn.Module):
    def __init__(s): super().__init__(); s.e, s.d = nn.Linear(8, 16), nn.Linear(16, 4)
    def forward(s, x): return s.d(torch.tanh(s.e(x)))
"""


@each_value()
@pytest.mark.parametrize("plan", ["bf16-master", "bf16-true"])
@pytest.mark.parametrize("what", OUTSIDE)
def test_parts_of_a_model_that_is_stored_low_are_called_from_outside(
    what: str, plan: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(HEAD + _M + OUTSIDE[what])
    plain = _printed(Forked(_python, ["train.py"], tmp_path, tmp_path / "plain"))
    torch.testing.assert_close(_printed(_run(plan, tmp_path)), plain, rtol=2e-2, atol=2e-2)
