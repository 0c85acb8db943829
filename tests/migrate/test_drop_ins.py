"""Rewritten scripts against the drop-ins: what an import names is there, and a session trains as the drop-in does."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from castwise.migrate.rewriting import rewrite

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.after.txt"))


def need(library: str) -> None:
    if importlib.util.find_spec("castwise.compat") is None or (
        importlib.util.find_spec(f"castwise.compat.{library}") is None
    ):
        pytest.skip(f"there is no castwise.compat.{library} yet")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("library", ["apex", "colossalai"])
def test_what_rewritten_scripts_import_is_there(library: str) -> None:
    need(library)
    imported = 0
    for script in SCRIPTS:
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("castwise.compat"):
                inside = node.module == "castwise.compat"
                if not (node.module or "").startswith(f"castwise.compat.{library}") and not inside:
                    continue
                for alias in node.names:
                    if alias.name == "*":
                        importlib.import_module(node.module or "")
                    elif not inside or alias.name == library:
                        parent = f"{node.module}.{alias.name}"
                        found = getattr(importlib.import_module(node.module or ""), alias.name, None)
                        assert found is not None or importlib.util.find_spec(parent), (
                            f"{script.name}: {parent}"
                        )
                        imported += 1
    assert imported >= 3


APEX = """
import torch
from torch import nn
from apex import amp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="LEVEL", verbosity=0)
losses, weights = [], []
for _ in range(8):
    inputs, targets = torch.randn(8, 16), torch.randint(4, (8,))
    loss = nn.functional.cross_entropy(model(inputs), targets) * 256
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    BETWEEN
    optimizer.step()
    losses.append(loss.item())
    weights.append(model[2].bias.detach().float().tolist())
"""
BETWEEN = {
    "clip": "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)",
    "look": "for parameter in model.parameters(): parameter.grad.clamp_(-0.01, 0.01)",
}

COLOSSAL = """
import torch
from torch import nn
import colossalai
from colossalai.amp import AMP_TYPE

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()
model, optimizer, criterion = colossalai.amp.convert_to_amp(model, optimizer, criterion, AMP_TYPE.MODE)
losses, weights = [], []
for _ in range(8):
    inputs, targets = torch.randn(8, 16), torch.randint(4, (8,))
    optimizer.zero_grad()
    loss = criterion(model(inputs), targets) * 256
    optimizer.backward(loss)
    optimizer.clip_grad_norm(model, 1.0)
    optimizer.step()
    losses.append(loss.item())
    weights.append([p.detach().float().tolist() for p in model.parameters()][-1])
"""


def _run(text: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "script", "exec"), space)
    return space


def _compare(script: str, library: str) -> None:
    need(library)
    session, _ = rewrite(script)
    assert "castwise.Amp(" in session
    assert library not in session
    drop_in = script.replace(f"from {library}", f"from castwise.compat.{library}")
    drop_in = drop_in.replace(f"import {library}", f"from castwise.compat import {library}")
    one, other = _run(session.replace('device="cuda"', 'device="cpu"')), _run(drop_in)
    if library == "apex":
        handle = getattr(other["amp"], "_amp_state").handle  # noqa: B009 - a name of Apex
        if handle is not None:
            handle._deactivate()
    eps = torch.finfo(torch.float16).eps
    for what in ("losses", "weights"):
        torch.testing.assert_close(
            torch.tensor(one[what]), torch.tensor(other[what]), rtol=16 * eps, atol=16 * eps
        )
    assert len({tuple(weight) for weight in one["weights"]}) < 8, (
        "no step was skipped, so skips were not compared"
    )


@pytest.mark.parametrize(("level", "between"), [("O1", "clip"), ("O1", "look"), ("O2", "clip")])
def test_a_session_trains_as_apex_does(level: str, between: str) -> None:
    _compare(APEX.replace("LEVEL", level).replace("BETWEEN", BETWEEN[between]), "apex")


@pytest.mark.parametrize("mode", ["TORCH", "NAIVE"])
def test_a_session_trains_as_colossalai_does(mode: str) -> None:
    _compare(COLOSSAL.replace("MODE", mode), "colossalai")
