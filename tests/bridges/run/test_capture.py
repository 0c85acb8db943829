"""``castwise try --tune``: the model, the loss and the batches of a script, recorded as it trains."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from castwise.bridges.run import record, try_script
from castwise.bridges.run.gate import EnoughError
from castwise.bridges.run.record import SameOptimizer, ScriptCapture
from castwise.bridges.run.tape import TapeLoss
from castwise.errors import CastwiseError

HEAD = """
import collections, dataclasses
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
X, Y, ce = torch.randn(6, 16, 8), torch.randint(0, 4, (6, 16)), nn.CrossEntropyLoss()
m = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4))
o = torch.optim.AdamW([{"params": m[0].parameters()}, {"params": m[2].parameters(), "lr": 0.01}], 0.02, betas=(0.8, 0.9))
losses = []
def step(loss): o.zero_grad(); loss.backward(); o.step(); losses.append(loss.item())
"""
FORMS = {
    "a criterion": "for x, y in zip(X, Y): step(ce(m(x), y))",
    "reductions and weights": """
w = torch.ones(16)
for x, y in zip(X, Y):
    w[0] += 1  # the batch has it as it was
    step((F.cross_entropy(m(x), y, reduction="none") * w).sum() / w.sum())
""",
    "a loss added up in place": """
for x, y in zip(X, Y):
    loss = torch.zeros(())
    for part, t in zip(m(x).split(4), y.split(4)): loss += ce(part, t)
    step(loss)
""",
    "outputs written to": """
for x, y in zip(X, Y):
    out = m(x); rows = out.view(4, 16); out[0] = -1.0; rows[1].mul_(2); out.clamp_(min=-2)
    step(ce(out, y))
""",
    "a penalty on weights": "for x, y in zip(X, Y): step(ce(m(x), y) + 1e-3 * sum(p.square().sum() for p in m.parameters()))",
    "metrics on the way": """
seen = torch.zeros(())
for x, y in zip(X, Y):
    out = m(x); seen += (out.argmax(1) == y).sum(); loss = ce(out, y); loss.detach().numpy(); step(loss); float(seen)
    with torch.no_grad(): m(x)
""",
    "parts of a step": """
for i, (x, y) in enumerate(zip(X, Y)):
    loss = ce(m(x), y) / 2; loss.backward(); losses.append(loss.item())
    if i % 2: o.step(); o.zero_grad()
""",
    "two passes, the second through the first": """
for x, y in zip(X, Y):
    a = m(x); b = m(torch.cat([a, a.T.reshape(16, 4)], 1)); step(ce(a, y) + F.mse_loss(b, a.detach()))
""",
    "a state that is carried on": """
h = torch.zeros(16, 4)
for x, y in zip(X, Y):
    out = m(torch.cat([x[:, :4], h], 1)); h = out.detach().tanh(); step(ce(out, y))
""",
    "an input that takes a gradient": """
for x, y in zip(X, Y):
    x = x.clone().requires_grad_(); out = m(x); g, = torch.autograd.grad(out.sum(), x, create_graph=True)
    step(ce(out, y) + g.square().mean())
""",
    "outputs in a dataclass and a dictionary": """
@dataclasses.dataclass
class Out: logits: torch.Tensor; rest: dict
class M(nn.Module):
    def __init__(s): super().__init__(); s.a = nn.Linear(8, 4)
    def forward(s, *, x, y=None): z = s.a(x); return Out(z, {"loss": None if y is None else ce(z, y)})
m = M(); o = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)
for x, y in zip(X, Y): out = m(x=x, y=y); step(out.rest["loss"] + out.logits.logsumexp(1).mean())
""",
    "compiled": "c = torch.compile(m, backend='aot_eager')\nfor x, y in zip(X, Y): step(ce(c(x), y))",
}  # fmt: skip
REFUSED = {
    "several models": (
        "n = nn.Linear(4, 4); o.add_param_group({'params': n.parameters()})\nstep(ce(n(m(X[0])), Y[0]))", "Sequential and Linear",
    ),
    "a function that is not torch's": (
        "class B(torch.autograd.Function):\n    @staticmethod\n    def forward(c, x): return x * 2\n    @staticmethod\n"
        "    def backward(c, g): return g\nstep(ce(B.apply(m(X[0])), Y[0]))", "by torch functions only",
    ),
    "no model": ("w = torch.zeros(2, requires_grad=True); w.sum().backward()", "the script trained no model"),
    "autocast": ("with torch.autocast('cpu'): loss = ce(m(X[0]), Y[0])\nstep(loss)", "runs its model in torch.autocast"),
    "several optimizers": (
        "p = torch.optim.SGD(m[0].parameters(), 0.1)\nstep(ce(m(X[0]), Y[0]))", "several optimizers update the model: AdamW, SGD",
    ),
    "another loss the second time": ("k = iter([1, 1.5])\nclass L(nn.Linear):\n    def forward(s, x): return super().forward(x) * next(k)\n"
        "m = L(8, 4); o = torch.optim.SGD(m.parameters(), 0.1)\nstep(ce(m(X[0]), Y[0]))", "when it is computed again"),
}  # fmt: skip


@pytest.fixture
def capture() -> Iterator[ScriptCapture]:
    made = ScriptCapture()
    yield made
    made.end()


def _run(capture: ScriptCapture, text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": __name__}
    capture.begin()
    try:
        exec(HEAD + text, names)
    except EnoughError:
        pass
    finally:
        capture.end()
    return names


@pytest.mark.parametrize("form", FORMS)
def test_training_on_what_was_recorded_is_training_as_the_script_did(
    form: str, capture: ScriptCapture
) -> None:
    script = _run(capture, FORMS[form])
    job = capture.job()
    assert len(job["batches"]) == len(script["losses"]) == 6
    loss, batches = (
        pickle.loads(pickle.dumps(TapeLoss(tuple(job["loss"].tapes)))),
        copy.deepcopy(job["batches"]),
    )
    model = copy.deepcopy(job["model"])
    optimizer = job["optimizer"](model.parameters())
    for number, batch in enumerate(batches):
        found = loss(model, batch)
        torch.testing.assert_close(float(found.detach()), script["losses"][number], rtol=1e-6, atol=0)
        found.backward()
        if form != "parts of a step" or number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for mine, own in zip(model.parameters(), script["m"].parameters(), strict=True):
        torch.testing.assert_close(mine, own)
    for (_, mine), (_, before) in zip(batches, job["batches"], strict=True):
        assert all(map(torch.equal, mine, before))  # running again does not change the batches


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_tuned_is_refused_with_the_reason(why: str, capture: ScriptCapture) -> None:
    text, said = REFUSED[why]
    _run(capture, text)
    with pytest.raises(CastwiseError, match=said):
        capture.job()


def test_an_optimizer_is_made_again_with_the_options_of_each_group() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(
        [{"params": model[1].parameters(), "lr": 0.5}, {"params": [model[0].weight]}], 0.1, momentum=0.9
    )
    other = copy.deepcopy(model)
    made = cloudpickle.loads(cloudpickle.dumps(SameOptimizer.of(optimizer, model)))(other.parameters())
    assert type(made) is torch.optim.SGD
    assert [(len(g["params"]), g["lr"], g["momentum"]) for g in made.param_groups] == [
        (2, 0.5, 0.9),
        (1, 0.1, 0.9),
    ]
    assert made.param_groups[1]["params"][0] is other[0].weight


@pytest.mark.usefixtures("forks")
def test_the_tuned_plan_is_tried_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script finds its helper module and its files, and nothing is written to its folder but ``runs``."""
    (tmp_path / "layers.py").write_text("import torch\nclass Net(torch.nn.Linear):\n    pass\n")
    (tmp_path / "train.py").write_text(
        "import torch\nfrom layers import Net\nm = Net(8, 4)\no = torch.optim.SGD(m.parameters(), 0.1)\n"
        "for _ in range(4000):\n    x = torch.randn(16, 8); o.zero_grad(); m(x).square().mean().backward(); o.step()\n"
        "    open('written', 'w').close()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(record.__file__).split("castwise")[0], os.environ.get("PYTHONPATH", "")]),
    )
    result = try_script("train.py", plans=["fp32"], rounds=1, tune=True, budget_s=5)
    assert result.tuned is not None
    assert result.answer
    assert {row.plan for row in result.plans} == {"fp32", result.tuned}
    assert (tmp_path / "runs/try-train/plan.json").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["layers.py", "runs", "train.py"]
