"""The linter finds the faults in scripts modelled on public ones and raises no alarm on sound scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from castwise.bridges.scripts.lint import lint
from tests.bridges.scripts.lint.corpus import compare, kinds, programs


@pytest.mark.parametrize("kind", kinds())
def test_faults_of_a_kind_are_found_where_they_are(kind: str, tmp_path: Path) -> None:
    given = list(programs(kind))
    results = [(program, *compare(program, program.check(tmp_path))) for program in given]
    assert [fault for _, _, others in results for fault in others] == []
    assert [(program.name, mark) for program, missed, _ in results for mark in missed] == []


def test_sound_scripts_raise_no_false_alarm(tmp_path: Path) -> None:
    sound = list(programs("sound"))
    assert len(sound) >= 100
    assert [fault for program in sound for fault in program.check(tmp_path)] == []


def test_the_flag_that_switches_a_fault_on_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_FLAGGED)
    found = {(one.rule, one.when) for one in lint(tmp_path).findings}
    assert found == {("scaler-not-saved", "args.amp"), ("clip-before-unscale", "args.amp and args.clip")}


_FLAGGED = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
parser.add_argument("--clip", type=float)
args = parser.parse_args()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    if args.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
"""
