"""What ``castwise.Amp`` would refuse when the script runs stays a loop of torch.amp, as far as the script shows it."""

from __future__ import annotations

import pytest

from castwise.bridges.scripts.migrate.rewriting import rewrite

SCRIPT = """\
import abc
import torch
from torch import nn
from torch.amp import GradScaler, autocast

class Base(abc.ABC):
    pass

class Duck(Base):
    def __init__(self):
        self.net = nn.Linear(2, 2)

class Real(nn.Linear):
    pass

class Derived(Real):
    pass

MODEL
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
BETWEEN
scaler = GradScaler("cpu"SCALE)
for x in []:
    with autocast("cpu", dtype=torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("model", "between", "scale", "why"),
    [
        ("model = Derived(2, 2)", "pass", "", ""),
        ("model = Derived(2, 2).double()", "model.train()", ", init_scale=0.25", ""),
        ("model = Duck()", "pass", "", "the class of 'model' does not derive from torch.nn.Module"),
        ("model = nn.Linear(2, 2).half()", "pass", "", "weights of 'model' are stored in low precision"),
        ("model = nn.Linear(2, 2)\nmodel = model.to(torch.bfloat16)", "pass", "", "stored in low precision"),
        ("model = nn.Linear(2, 2, dtype=torch.half)", "pass", "", "stored in low precision"),
        ("model = nn.Linear(2, 2)", "model.half()", "", "stored in low precision"),
        ("model = nn.LazyLinear(2)", "pass", "", "weights of 'model' have no shape"),
        (
            "model = nn.Sequential(nn.LazyConv1d(2, 2), nn.ReLU())",
            "pass",
            "",
            "weights of 'model' have no shape",
        ),
        ("model = nn.Linear(2, 2)", "pass", ", init_scale=1e-5", "init_scale is below 2**-14"),
    ],
)
def test_a_session_that_would_be_refused(model: str, between: str, scale: str, why: str) -> None:
    text = SCRIPT.replace("MODEL", model).replace("BETWEEN", between).replace("SCALE", scale)
    after, findings = rewrite(text)
    assert ("castwise.Amp(" in after) is (why == "")
    assert any(finding.kind == "left" and why in finding.text for finding in findings) or not why
